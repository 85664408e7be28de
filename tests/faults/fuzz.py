"""Bad bytes: every file that undrop reads, and its command line, changed at random.

Only undrop's own errors may come out. A subject is a sound file and what reads it; a case is the file
with bytes flipped, cut, doubled or put in, or (for JSON) with a value replaced, dropped or renamed.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiny_run import tiny_config, write_text
from undrop import cli, corpora, train
from undrop.errors import StoppedError, UndropError
from undrop.reproduce.records import Curve, Record, Records
from undrop.train import configure, presets
from undrop.train.checkpoints import _check, load_tensors
from undrop.train.runs import row

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 2)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "..", "/etc/passwd", "$tensor", "\x00", "1e999", "[" * 2000])
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "double", "end"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def edited(sample: bytes, edits) -> bytes:
    """The bytes after each of the edits, at a place that is a share of their length."""
    data = bytearray(sample)
    for kind, share, payload in edits:
        place = int(share * len(data))
        if kind == "flip" and place < len(data):
            data[place] ^= payload[0] or 1
        elif kind == "cut":
            del data[place : place + payload[0]]
        elif kind == "insert":
            data[place:place] = payload
        elif kind == "double":
            data[place:place] = data[place : place + payload[0]]
        elif kind == "end":
            del data[place:]
    return bytes(data)


def replaced(value, path, new, how):
    """The JSON value with what ``path`` leads to replaced, dropped or renamed."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    key = list(value)[path[0] % len(value)] if isinstance(value, dict) else path[0] % len(value)
    value = value.copy()
    if len(path) > 1 and isinstance(value[key], dict | list) and value[key]:
        value[key] = replaced(value[key], path[1:], new, how)
    elif how == "drop":
        del value[key]
    elif how == "rename" and isinstance(value, dict):
        value[str(new)] = value.pop(key)
    else:
        value[key] = new
    return value


PATHS = st.lists(st.integers(0, 30), min_size=1, max_size=5)
HOWS = st.sampled_from(["replace", "replace", "drop", "rename"])


def json_edited(sample: bytes) -> st.SearchStrategy[bytes]:
    """The JSON file with one value changed."""
    value = json.loads(sample)
    changed = st.builds(replaced, st.just(value), PATHS, VALUES, HOWS)
    return changed.map(lambda new: json.dumps(new).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class Subject:
    """A file, what reads it, and whether it is JSON."""

    path: Path
    read: Callable[[], object]
    is_json: bool = False
    sign: Callable[[bytes], bytes] = bytes

    def cases(self) -> st.SearchStrategy[bytes]:
        sample = self.path.read_bytes()
        raw = st.builds(edited, st.just(sample), EDITS) | st.binary(max_size=64)
        return (raw | json_edited(sample)).map(self.sign) if self.is_json else raw

    def survives(self, data: bytes) -> None:
        """Write the case, read it, put the sound file back; any other error comes out."""
        sound = self.path.read_bytes()
        self.path.write_bytes(data)
        try:
            with contextlib.suppress(UndropError):
                self.read()
        finally:
            self.path.write_bytes(sound)


def signed(data: bytes) -> bytes:
    """A checkpoint's JSON with the checksum made to fit: damage that no checksum tells of."""
    try:
        body = json.loads(data)
        body.pop("check", None)
        return json.dumps({**body, "check": _check(body)}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data


def subjects(folder: Path) -> dict[str, Subject]:
    """All files of a tiny run, its corpus and a record, made in ``folder``."""
    os.environ["UNDROP_CACHE"] = str(folder / "cache")
    text = folder / "text"
    text.mkdir()
    config = tiny_config(write_text(text), train={"epochs": 1})
    out = folder / "run"
    train.run(config, out=out)
    run = train.RunFolder(out)
    step = run.checkpoints.steps()[-1]
    checkpoint = run.checkpoints.path(step)
    tensors = checkpoint.parent / json.loads(checkpoint.read_bytes())["tensors"]
    encoded = corpora.load(str(text)).folder
    records = Records(folder / "records")
    records.add(_record(config))

    def load():
        return run.checkpoints.load(step)

    def look():
        return row(run), run.metrics.read()

    def words():
        corpus = corpora.load(str(text))
        return corpus.vocabulary.decode(corpus.train[:20]), len(corpus.vocabulary.index)

    return {
        "checkpoint": Subject(checkpoint, load, is_json=True),
        "signed checkpoint": Subject(checkpoint, _resumed(run), is_json=True, sign=signed),
        "checkpoint tensors": Subject(tensors, load),
        "weights": Subject(
            out / "best.safetensors", lambda: load_tensors(out / "best.safetensors")
        ),
        "config": Subject(
            out / "config.json", lambda: train.Config.parse(run.read_config()), is_json=True
        ),
        "metrics": Subject(out / "metrics.jsonl", look),
        "summary": Subject(out / "summary.json", look, is_json=True),
        "record": Subject(
            next((folder / "records").iterdir()), lambda: Records(folder / "records"), is_json=True
        ),
        "corpus header": Subject(encoded / "header.json", words, is_json=True),
        "vocabulary": Subject(encoded / "vocabulary.txt", words),
        "corpus tokens": Subject(encoded / "train.bin", words),
        "text": Subject(text / "train.txt", words),
    }


def _resumed(run):
    """Goes on with the run until its state is in place; no step is taken."""
    stop = StoppedError("in place")

    def resume():
        with mock.patch("undrop.train.session._outline", side_effect=stop):
            train.run(out=run.path, resume=True)

    return resume


def _record(config):
    return Record(
        config=config.as_dict(),
        probe=None,
        key=hashlib.sha256(b"").hexdigest(),
        seed=1,
        best_valid_ppl=2.0,
        best_epoch=1,
        test_ppl=None,
        ended="epochs",
        steps=3,
        seconds=1.0,
        parameters=9,
        curve=Curve(
            epoch=[1], step=[3], valid_ppl=[2.0], train_ppl=[None], seconds=[1.0], judging=[0.1]
        ),
        probed={},
        versions={"undrop": "0"},
        machine={},
        commit=None,
        finished="2026-01-01T00:00:00+00:00",
    )


SECTIONS = ("model", "data", "objective", "optimizer", "schedule", "train", "preset", "x")
KEYS = (
    "name",
    "lr",
    "p",
    "seed",
    "fraction",
    "betas",
    "epochs",
    "layers",
    "strength",
    "sites",
    "",
    "a.b",
)
TOML = (
    PLAIN.map(str) | st.text(max_size=12) | st.sampled_from(["[[1]]", "{a=1}", "'''", "nan", "inf"])
)
OVERRIDES = st.builds("{}.{}={}".format, st.sampled_from(SECTIONS), st.sampled_from(KEYS), TOML)
SETTINGS = st.dictionaries(
    st.sampled_from(SECTIONS), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3) | VALUES
)


def configured(overrides, values, name) -> None:
    """A preset with settings and overrides laid over it."""
    with contextlib.suppress(UndropError):
        configure(name, values, overrides)


NAMES = st.sampled_from([*presets(), "nothing"]) | st.none()
COMMANDS = sorted(set(cli.commands()) - {"demo", "bench"})  # these work with no argument at all
WORDS = (
    OVERRIDES
    | st.text(max_size=6)
    | st.sampled_from(
        [
            *("--set", "--out", "--seed", "--json", "--resume", "--data-dir", "--split", "--model"),
            *("--data", "--objective", "--preset", "--scale", "--dry-run", "--seeds", "--jobs"),
            *("--prompt", "--words", "--top-k", "--temperature", "--value", "--help", "--", "-1"),
            *(
                "awd-lstm",
                "analytic",
                "run",
                "text",
                "records",
                "..",
                "a",
                "nan",
                "1",
                "info",
                "get",
            ),
            *("list", "x:y", "os:system", "demo"),
        ]
    )
)
LINES = st.builds(
    lambda command, words: [command, *words], st.sampled_from(COMMANDS), st.lists(WORDS, max_size=5)
)


def commanded(line) -> None:
    """A command line ends with 0, 1 or 2, and where it fails, with a sentence; no work is begun."""
    stop = StoppedError("begun")
    shown, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch("undrop.train.run", side_effect=stop),
        mock.patch("undrop.reproduce.Campaign.run", side_effect=stop),
        mock.patch("undrop.corpora.corpus.fetch", side_effect=stop),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(errors),
    ):
        code = cli.main(line)
    assert code in (0, 1, 2, 130), code
    assert "Traceback" not in errors.getvalue()
    assert code != 2 or errors.getvalue() or shown.getvalue()  # a sentence, or the help


def fuzz(check: Callable[..., None], strategies, cases: int, seed: int) -> None:
    """Run ``check`` on so many cases; hypothesis shows the smallest that fails."""
    options = settings(
        max_examples=cases,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    hypothesis.seed(seed)(options(given(*strategies)(check)))()


def campaigns(folder: Path) -> dict[str, tuple[Callable[..., None], tuple[st.SearchStrategy, ...]]]:
    """Every kind of bad bytes: a check and what to draw for it."""
    files = {name: (one.survives, (one.cases(),)) for name, one in subjects(folder).items()}
    return {
        **files,
        "presets and --set": (configured, (st.lists(OVERRIDES, max_size=2), SETTINGS, NAMES)),
        "command line": (commanded, (LINES,)),
    }
