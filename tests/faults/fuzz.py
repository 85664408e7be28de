"""Bad bytes: every file that undrop reads, and its command line, changed at random.

undrop must raise only its own errors, and soon. A kind draws a case and checks it. For a file, the
case is a valid file with bytes or values changed, and the check reads it.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from faults.cases import json_case, line_case, preset_case, raw
from tiny_run import tiny_config, write_text
from undrop.errors import StoppedError, UndropError
from undrop.lab import cli, corpora, train
from undrop.lab.reproduce.records import Curve, Record, Records
from undrop.lab.train import configure
from undrop.lab.train.environment import Interrupts, World
from undrop.lab.train.folder import _checksum
from undrop.lab.train.runs import describe_run
from undrop.lab.train.session import _resume
from undrop.lab.train.trainer import Trainer
from undrop.tensor_files import load_tensors

KINDS = (
    *("checkpoint", "signed checkpoint", "checkpoint tensors", "weights", "config", "metrics"),
    *("summary", "record", "corpus header", "vocabulary", "corpus tokens", "text"),
    *("preset file", "presets and --set", "command line"),
)
"""The names of all kinds."""

LONGEST = 20.0
"""Seconds after which a case is taken to hang."""


@dataclass(frozen=True)
class Kind:
    """A kind of bad bytes: ``check`` raises if undrop fails on what ``case`` draws.

    ``sound`` is the valid file, for kinds that are files.
    """

    case: Callable[[Random], Any]
    check: Callable[[Any], None]
    sound: bytes | None = None


class HungError(BaseException):
    """A case that did not end; no ``except Exception`` can hide it."""


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Stop a case that hangs: each case has ``LONGEST`` seconds after it starts the timer again."""

    def hung(*_: Any) -> None:
        raise HungError

    former = signal.signal(signal.SIGALRM, hung)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def fuzz(name: str, kind: Kind, cases: int, seed: int) -> None:
    """Try cases; raise the first failure, with the seed that draws it again."""
    with _watched():
        for place in range(cases):
            signal.setitimer(signal.ITIMER_REAL, LONGEST)
            case = kind.case(Random(f"{seed}/{place}"))
            try:
                kind.check(case)
            except BaseException as error:
                raise AssertionError(
                    f"{name}, seed {seed}, case {place}: {case!r:.2000}"
                ) from error


@dataclass(frozen=True)
class Subject:
    """A file and the function that reads it."""

    path: Path
    read: Callable[[], object]

    def kind(self, *, is_json: bool = False, sign: Callable[[bytes], bytes] = bytes) -> Kind:
        """The file with bytes changed, and with values changed where it is JSON, then signed."""
        sound, stat = self.path.read_bytes(), self.path.stat()
        case = json_case(sound) if is_json else functools.partial(raw, sample=sound)

        def survives(data: bytes) -> None:
            self.path.write_bytes(sign(data))
            try:
                with contextlib.suppress(UndropError):
                    self.read()
            finally:
                self.path.write_bytes(sound)
                os.utime(self.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

        return Kind(case, survives, sound)


def signed(data: bytes) -> bytes:
    """A checkpoint's JSON with a checksum that matches: damage that no checksum finds."""
    try:
        body = json.loads(data)
        body.pop("check", None)
        return json.dumps({**body, "check": _checksum(body)}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data


def of_a_run(folder: Path, text: Path) -> dict[str, Kind]:
    """The files of a tiny run and of a record."""
    config = tiny_config(text, train={"epochs": 1})
    out = folder / "run"
    train.run(config, out=out)
    run = train.RunFolder(out)
    step = run.checkpoints.steps()[-1]
    checkpoint = run.checkpoints.path(step)
    tensors = checkpoint.parent / json.loads(checkpoint.read_bytes())["tensors"]
    records, best = folder / "records", out / "best.safetensors"
    Records(records).add(_record(config))

    def load() -> object:
        return run.checkpoints.load(step)

    def look() -> object:
        return describe_run(run), run.metrics.read()

    def parse() -> object:
        return train.Config.parse(run.read_config())

    return {
        "checkpoint": Subject(checkpoint, load).kind(is_json=True),
        "signed checkpoint": _resumed(out, folder / "resumed").kind(is_json=True, sign=signed),
        "checkpoint tensors": Subject(tensors, load).kind(),
        "weights": Subject(best, lambda: load_tensors(best)).kind(),
        "config": Subject(out / "config.json", parse).kind(is_json=True),
        "metrics": Subject(out / "metrics.jsonl", look).kind(),
        "summary": Subject(out / "summary.json", look).kind(is_json=True),
        "record": Subject(next(records.iterdir()), lambda: Records(records)).kind(is_json=True),
    }


def _resumed(out: Path, copy: Path) -> Subject:
    """The checkpoint that a copy of the run resumes from; no step is taken."""
    run = train.RunFolder(shutil.copytree(out, copy))
    config = train.Config.parse(run.read_config())
    trainer = Trainer(config, config.load_corpus(), run, [], World(), Interrupts())
    path = run.checkpoints.path(run.checkpoints.steps()[-1])
    return Subject(path, lambda: _resume(trainer))


def of_a_corpus(text: Path) -> dict[str, Kind]:
    """The files of a tiny corpus, encoded and as text."""
    encoded = corpora.load(str(text)).folder

    def words() -> Path:
        corpus = corpora.load(str(text))
        corpus.vocabulary.decode(corpus.train[:20])
        assert len(corpus.vocabulary.index) <= corpus.vocabulary.size
        return corpus.folder

    def words_anew() -> None:
        shutil.rmtree(words())  # another text is another folder

    return {
        "corpus header": Subject(encoded / "header.json", words).kind(is_json=True),
        "vocabulary": Subject(encoded / "vocabulary.txt", words).kind(),
        "corpus tokens": Subject(encoded / "train.bin", words).kind(),
        "text": Subject(text / "train.txt", words_anew).kind(),
    }


def _record(config: train.Config) -> Record:
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


def configured(case: tuple[str | None, dict[str, Any], list[str]]) -> None:
    """A preset with settings and overrides."""
    with contextlib.suppress(UndropError):
        configure(*case)


def of_a_preset(folder: Path) -> dict[str, Kind]:
    """A preset in a separate file."""
    file = folder / "own.toml"
    shutil.copy(resources.files("undrop") / "presets" / "ptb-awd-lstm-small.toml", file)
    return {"preset file": Subject(file, lambda: configure(str(file))).kind()}


COMMANDS = cli.commands()  # read from the files only once


def commanded(line: list[str]) -> None:
    """A command line exits with 0, 1 or 2, prints a sentence if it fails, and starts no work."""
    stop = StoppedError("begun")
    shown, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch("undrop.lab.cli.commands", return_value=COMMANDS),
        mock.patch("undrop.lab.train.run", side_effect=stop),
        mock.patch("undrop.lab.reproduce.campaign.Campaign.run", side_effect=stop),
        mock.patch("undrop.lab.cli.diagnose._measured", side_effect=stop),
        mock.patch("undrop.check", side_effect=stop),
        mock.patch("undrop.lab.corpora.corpus.fetch", side_effect=stop),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(errors),
    ):
        code = cli.main(line)
    assert code in (0, 1, 2, 130), code
    assert "Traceback" not in errors.getvalue()
    assert code != 2 or errors.getvalue() or shown.getvalue()  # a sentence, or the help


def kinds(folder: Path) -> dict[str, Kind]:
    """Every kind of bad bytes, with a valid file of each in ``folder``."""
    os.environ["UNDROP_CACHE"] = str(folder / "cache")
    text = folder / "text"
    text.mkdir()
    return {
        **of_a_run(folder, write_text(text)),
        **of_a_corpus(text),
        **of_a_preset(folder),
        "presets and --set": Kind(preset_case, configured),
        "command line": Kind(line_case, commanded),
    }
