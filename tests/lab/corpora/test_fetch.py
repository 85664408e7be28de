"""Downloads from a server that the test starts."""

import hashlib
import io
import socket
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from undrop.errors import DataError
from undrop.lab import corpora
from undrop.lab.corpora import catalogue
from undrop.lab.corpora.catalogue import Mirror, NamedCorpus

FILES = {split: f"x.{split}.txt" for split in corpora.SPLITS}
TEXT = {name: f"words of {name}\n".encode() for name in FILES.values()}


def sha256(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def server(monkeypatch):
    """A server for the files in ``.files``; ``.asked`` lists the requests."""
    state = SimpleNamespace(files={}, asked=[])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.asked.append(self.path)
            content = state.files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{http.server_port}"
    monkeypatch.setattr(catalogue, "_SCHEMES", ("https", "http"))
    yield state
    http.shutdown()
    http.server_close()


def corpus_with(*downloads):
    return NamedCorpus("x", "none", FILES, downloads=downloads)


def archive(url, content):
    return corpus_with((Mirror(url, sha256(content)),))


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def tarred(members, links=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            file.addfile(info)
    return buffer.getvalue()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_mirrors_are_tried_in_order_until_one_sends_the_right_bytes(server, tmp_path):
    downloads = []
    for name, content in TEXT.items():
        places = [f"/{mirror}/{name}" for mirror in ("gone", "wrong", "right", "unneeded")]
        server.files |= {places[1]: b"something else", places[2]: content, places[3]: content}
        downloads.append(tuple(Mirror(server.url + place, sha256(content)) for place in places))
    catalogue.fetch(corpus_with(*downloads), tmp_path / "text" / "x")
    assert {path.name: path.read_bytes() for path in (tmp_path / "text/x").iterdir()} == TEXT
    assert [path.split("/")[1] for path in server.asked] == ["gone", "wrong", "right"] * 3
    assert names(tmp_path / "text") == ["x"]  # nothing is left of what was tried


@pytest.mark.parametrize(("name", "pack"), [("/a.zip", zipped), ("/a.tar.gz", tarred)])
def test_unpacking_copies_only_wanted_files_and_only_into_the_folder(server, tmp_path, name, pack):
    evil = {"../evil.txt": b"1", "/tmp/undrop-evil.txt": b"2", "x/../../y/evil.txt": b"3"}
    nested = {f"../some/{file}": content for file, content in TEXT.items()}
    content = pack({**evil, **nested, "x/README": b"4"})
    server.files[name] = content
    catalogue.fetch(archive(server.url + name, content), tmp_path / "deep" / "x")
    assert names(tmp_path / "deep" / "x") == sorted(FILES.values())
    assert (tmp_path / "deep" / "x" / FILES["test"]).read_bytes() == TEXT[FILES["test"]]
    assert names(tmp_path) == ["deep"]
    assert names(tmp_path / "deep") == ["x"]


def test_a_link_in_an_archive_is_not_unpacked(server, tmp_path):
    content = tarred({}, links=[(name, "/etc/passwd") for name in TEXT])
    server.files["/a.tgz"] = content
    with pytest.raises(DataError, match=r"the download of x has no x\.train\.txt, x\.valid\.txt"):
        catalogue.fetch(archive(f"{server.url}/a.tgz", content), tmp_path / "x")
    assert names(tmp_path) == []


def test_a_broken_archive_is_refused(server, tmp_path):
    server.files["/a.zip"] = b"no archive"
    with pytest.raises(DataError, match=r"the archive a\.zip can't be read"):
        catalogue.fetch(archive(f"{server.url}/a.zip", b"no archive"), tmp_path / "x")


def test_a_wrong_checksum_on_every_mirror_leaves_no_file(server, tmp_path):
    server.files["/a.zip"] = b"changed"
    with pytest.raises(DataError) as error:
        catalogue.fetch(archive(f"{server.url}/a.zip", b"released"), tmp_path / "x")
    host = server.url.removeprefix("http://")
    assert str(error.value) == (
        f"x could not be downloaded ({host} sent a file with the wrong checksum): try again later, "
        "or get the files yourself and give their folder as --data-dir."
    )
    assert names(tmp_path) == []


def test_an_unreachable_mirror_is_reported_in_one_sentence(server, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DataError, match=rf"\(127.0.0.1:{port} could not be reached\): try again"):
        catalogue.fetch(archive(f"http://127.0.0.1:{port}/a.zip", b""), tmp_path / "x")


def test_downloads_use_https_only(tmp_path):
    with pytest.raises(DataError, match=r"127.0.0.1 was not tried: http is not safe"):
        catalogue.fetch(archive("http://127.0.0.1/a.zip", b""), tmp_path / "x")


def test_a_download_without_pooch_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(
        DataError, match=r"needs the pooch library: .* pip install 'undrop\[data\]'"
    ):
        catalogue.fetch(archive("https://127.0.0.1/a.zip", b""), tmp_path / "x")


def test_a_cache_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"the cache folder .*file can't be written"):
        catalogue.fetch(archive("https://127.0.0.1/a.zip", b""), tmp_path / "file" / "x")


def test_a_named_corpus_is_downloaded_once(server, cache, monkeypatch):
    content = zipped({f"x/{name}": text for name, text in TEXT.items()})
    server.files["/a.zip"] = content
    made = archive(f"{server.url}/a.zip", content)
    monkeypatch.setitem(catalogue.CATALOGUE._entries, "x", made)
    for _ in range(2):
        corpus = corpora.load("x")
    assert server.asked == ["/a.zip"]
    assert corpus.vocabulary.decode(corpus.test) == ["words", "of", corpora.UNK, corpora.EOS]


def test_every_download_in_the_catalogue_uses_https_and_has_a_checksum():
    lengths = {"sha256": 64, "sha512": 128}
    for known in catalogue.CATALOGUE.values():
        for mirrors in known.downloads:
            assert len(mirrors) >= 2
            for mirror in mirrors:
                algorithm, digest = mirror.checksum.split(":")
                assert mirror.url.startswith("https://")
                assert len(digest) == lengths[algorithm]
                assert set(digest) <= set("0123456789abcdef")
