"""undrop runs no code from a file that it reads, and no name leads out of its folder."""

import ast
import json
import pickle
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import undrop
from tiny_run import tiny_config, write_text
from undrop.errors import CheckpointError, OptionError, UndropError
from undrop.files import sha256
from undrop.lab import corpora, train
from undrop.lab.cli.train import RUNS, _default_name
from undrop.lab.reproduce.records import Records
from undrop.lab.train.folder import _checksum
from undrop.tensor_files import load_tensors

SOURCES = sorted(Path(undrop.__file__).parent.rglob("*.py"))
UNSAFE_MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml"}
UNSAFE_CALLS = {
    *("torch.load", "torch.save", "np.load", "numpy.load", "eval", "exec", "compile"),
    *("os.system", "os.popen", "torch.hub.load", "tarfile.extractall", "shutil.unpack_archive"),
}


def unsafe(source):
    """Yield the imports and calls in source code that could run code from a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            yield from names & (UNSAFE_CALLS | UNSAFE_MODULES)
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                yield ast.unparse(node)
            if any(keyword.arg in ("shell", "allow_pickle") for keyword in node.keywords):
                yield ast.unparse(node)
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("extract", "extractall"):
                yield ast.unparse(node)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: "/".join(file.parts[-2:]))
def test_no_source_reads_pickles_or_runs_text(file):
    assert list(unsafe(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from torch import load", "import torch; torch.load(f)", "eval(x)"),
        *(
            "archive.extractall(p)",
            "np.load(f, allow_pickle=True)",
            "subprocess.run(x, shell=True)",
        ),
    ],
)
def test_the_scan_for_unsafe_code_finds_an_unsafe_call(text):
    assert list(unsafe(text))


class Payload:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a text and a tiny run on it."""
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    config = tiny_config(write_text(tmp_path / "text"), train={"epochs": 1})
    train.run(config, out=tmp_path / "run")
    return tmp_path


def test_a_pickle_in_place_of_any_file_is_not_executed(folder):
    mark = folder / "code was run"
    payload = pickle.dumps(Payload(mark))
    pickle.loads(payload)  # noqa: S301
    assert mark.exists()  # loading the pickle does run its code
    mark.unlink()
    run = train.RunFolder(folder / "run")
    checkpoint = run.checkpoints.path(run.checkpoints.steps()[-1])
    body = json.loads(checkpoint.read_bytes())
    tensors = checkpoint.parent / body["tensors"]
    tensors.write_bytes(payload)
    body = {**body, "sha256": sha256(tensors)}  # matches the pickle
    body.pop("check")
    checkpoint.write_text(json.dumps({**body, "check": _checksum(body)}))
    with pytest.raises(CheckpointError, match="was truncated or modified"):
        run.checkpoints.load(run.checkpoints.steps()[-1])
    readers = {
        run.path / "best.safetensors": lambda: load_tensors(run.path / "best.safetensors"),
        run.path / "config.json": run.read_config,
        run.path / "summary.json": run.read_summary,
        run.path / "metrics.jsonl": run.metrics.read,
        folder / "records" / "a.json": lambda: Records(folder / "records"),
        folder / "text" / "train.txt": lambda: corpora.load(folder / "text"),
    }
    (folder / "records").mkdir()
    for path, read in readers.items():
        path.write_bytes(payload)
        with pytest.raises(UndropError):
            read()
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "..", "a/../../b"])
def test_a_run_name_cannot_leave_the_runs_folder(folder, name):
    presets = tiny_config(folder / "text").model_copy(update={"preset": name})
    corpus = tiny_config(name)
    for config in (presets, corpus):
        assert (RUNS / _default_name(config)).resolve().parent == RUNS.resolve()
    with pytest.raises(OptionError, match="the name of a run must be a plain folder name, got"):
        train.train_interleaved({name: presets}, out=folder / "out")
    assert not (folder / "out").exists()


def required(name, extras=frozenset(), found=None):
    """The packages that a package requires on this machine, directly and indirectly."""
    found = {} if found is None else found
    if (name, extras) not in found:
        found[name, extras] = None
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # an extra that is not installed
            lines = []
        for line in map(Requirement, lines):
            if any(
                line.marker is None or line.marker.evaluate({"extra": x}) for x in ("", *extras)
            ):
                required(canonicalize_name(line.name), frozenset(line.extras), found)
    return {name for name, _ in found}


def test_every_dependency_is_pinned():
    constraints = Path(__file__).parents[2] / "constraints.txt"
    lines = [line for line in constraints.read_text().splitlines() if line and line[0] != "#"]
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    assert len(pinned) == len(lines)
    assert required("undrop", frozenset({"dev"})) - pinned == {"undrop"}
