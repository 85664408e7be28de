"""Bad bytes: random changes in every file that undrop reads, and random command lines.

undrop must raise only its own errors, and must not hang. A kind of bad bytes draws cases and checks
them. For a kind of file, a case is a valid file with changed bytes or values, and the check reads it.
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

TIME_LIMIT = 20.0
"""A case that takes more seconds than this hangs."""


@dataclass(frozen=True)
class Kind:
    """A kind of bad bytes: ``case`` draws a case, and ``check`` raises an error if undrop fails on it.

    For a kind of file, ``valid`` holds the bytes of the valid file.
    """

    case: Callable[[Random], Any]
    check: Callable[[Any], None]
    valid: bytes | None = None


class HungError(BaseException):
    """A case that hangs. It is a BaseException, so that no ``except Exception`` catches it."""


@contextlib.contextmanager
def _raise_on_timeout() -> Iterator[None]:
    """Raise a HungError in the block when the timer, which every case restarts, expires."""

    def raise_error(*_: Any) -> None:
        raise HungError

    previous = signal.signal(signal.SIGALRM, raise_error)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def fuzz(name: str, kind: Kind, cases: int, seed: int) -> None:
    """Try cases; raise the first failure, with the seed that reproduces it."""
    with _raise_on_timeout():
        for number in range(cases):
            signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
            case = kind.case(Random(f"{seed}/{number}"))
            try:
                kind.check(case)
            except BaseException as error:
                raise AssertionError(
                    f"{name}, seed {seed}, case {number}: {case!r:.2000}"
                ) from error


@dataclass(frozen=True)
class Subject:
    """A file and the function that reads it."""

    path: Path
    read: Callable[[], object]

    def kind(self, *, is_json: bool = False, sign: Callable[[bytes], bytes] = bytes) -> Kind:
        """Return a kind whose cases are this file with changed bytes or, if it is JSON, values.

        ``sign`` updates the checksum in a case, so that the checksum does not reveal the damage.
        """
        valid, stat = self.path.read_bytes(), self.path.stat()
        case = json_case(valid) if is_json else functools.partial(raw, sample=valid)

        def check(data: bytes) -> None:
            self.path.write_bytes(sign(data))
            try:
                with contextlib.suppress(UndropError):
                    self.read()
            finally:
                self.path.write_bytes(valid)
                os.utime(self.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

        return Kind(case, check, valid)


def sign_checkpoint(data: bytes) -> bytes:
    """Return a checkpoint's JSON with a checksum that matches, so that it does not reveal damage."""
    try:
        body = json.loads(data)
        body.pop("check", None)
        return json.dumps({**body, "check": _checksum(body)}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data


def run_kinds(folder: Path, text: Path) -> dict[str, Kind]:
    """Return the kinds of the files of a tiny run, and of a record."""
    config = tiny_config(text, train={"epochs": 1})
    out = folder / "run"
    train.run(config, out=out)
    run = train.RunFolder(out)
    step = run.checkpoints.steps()[-1]
    checkpoint = run.checkpoints.path(step)
    tensors = checkpoint.parent / json.loads(checkpoint.read_bytes())["tensors"]
    resumed = _resumed_checkpoint(out, folder / "resumed")
    records, best = folder / "records", out / "best.safetensors"
    Records(records).add(_record(config))

    def load() -> object:
        return run.checkpoints.load(step)

    def describe() -> object:
        return describe_run(run), run.metrics.read()

    def parse() -> object:
        return train.Config.parse(run.read_config())

    return {
        "checkpoint": Subject(checkpoint, load).kind(is_json=True),
        "signed checkpoint": resumed.kind(is_json=True, sign=sign_checkpoint),
        "checkpoint tensors": Subject(tensors, load).kind(),
        "weights": Subject(best, lambda: load_tensors(best)).kind(),
        "config": Subject(out / "config.json", parse).kind(is_json=True),
        "metrics": Subject(out / "metrics.jsonl", describe).kind(),
        "summary": Subject(out / "summary.json", describe).kind(is_json=True),
        "record": Subject(next(records.iterdir()), lambda: Records(records)).kind(is_json=True),
    }


def _resumed_checkpoint(out: Path, copy: Path) -> Subject:
    """Return the checkpoint from which a copy of the run resumes, without taking a step."""
    run = train.RunFolder(shutil.copytree(out, copy))
    config = train.Config.parse(run.read_config())
    trainer = Trainer(config, config.load_corpus(), run, [], World(), Interrupts())
    path = run.checkpoints.path(run.checkpoints.steps()[-1])
    return Subject(path, lambda: _resume(trainer))


def corpus_kinds(text: Path) -> dict[str, Kind]:
    """Return the kinds of the files of a tiny corpus: encoded, and as text."""
    encoded = corpora.load(str(text)).folder

    def load() -> Path:
        corpus = corpora.load(str(text))
        corpus.vocabulary.decode(corpus.train[:20])
        assert len(corpus.vocabulary.index) <= corpus.vocabulary.size
        return corpus.folder

    def load_and_delete() -> None:
        shutil.rmtree(load())  # each text is encoded into a new folder

    return {
        "corpus header": Subject(encoded / "header.json", load).kind(is_json=True),
        "vocabulary": Subject(encoded / "vocabulary.txt", load).kind(),
        "corpus tokens": Subject(encoded / "train.bin", load).kind(),
        "text": Subject(text / "train.txt", load_and_delete).kind(),
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


def check_configure(case: tuple[str | None, dict[str, Any], list[str]]) -> None:
    """Check that a preset with settings and overrides raises only undrop's errors."""
    with contextlib.suppress(UndropError):
        configure(*case)


def preset_kinds(folder: Path) -> dict[str, Kind]:
    """Return the kind of a preset in the user's own file."""
    file = folder / "own.toml"
    shutil.copy(resources.files("undrop") / "presets" / "ptb-awd-lstm-small.toml", file)
    return {"preset file": Subject(file, lambda: configure(str(file))).kind()}


COMMANDS = cli.commands()  # here, because reading them for every case is slow


def check_command(line: list[str]) -> None:
    """Check that a command line exits with 0, 1 or 2, and prints a sentence if it fails.

    Functions that start long work are replaced: they raise a StoppedError, and the exit code is 130.
    """
    stop = StoppedError("replaced")
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch("undrop.lab.cli.commands", return_value=COMMANDS),
        mock.patch("undrop.lab.train.run", side_effect=stop),
        mock.patch("undrop.lab.reproduce.campaign.Campaign.run", side_effect=stop),
        mock.patch("undrop.diagnose", side_effect=stop),
        mock.patch("undrop.check", side_effect=stop),
        mock.patch("undrop.lab.corpora.corpus.fetch", side_effect=stop),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = cli.main(line)
    assert code in (0, 1, 2, 130), code
    assert "Traceback" not in errors.getvalue()
    assert code != 2 or errors.getvalue() or output.getvalue()  # a sentence, or the help


def kinds(folder: Path) -> dict[str, Kind]:
    """Return every kind of bad bytes, and write the valid files to ``folder``."""
    os.environ["UNDROP_CACHE"] = str(folder / "cache")
    text = folder / "text"
    text.mkdir()
    return {
        **run_kinds(folder, write_text(text)),
        **corpus_kinds(text),
        **preset_kinds(folder),
        "presets and --set": Kind(preset_case, check_configure),
        "command line": Kind(line_case, check_command),
    }
