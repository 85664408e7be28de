"""Records: one small JSON file per finished run. A record never changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from undrop.errors import ConfigError, RunError
from undrop.files import naming_disk_errors, read_json, write_json
from undrop.lab.train import Config


def run_key(config: Config, probe: str | None) -> str:
    """Return the key of a run: a hash of its config (64 digits), and ``-probe`` if it has a probe."""
    digest = config.digest()
    return digest if probe is None else f"{digest}-{probe}"


def short_key(key: str) -> str:
    """Return a key with 16 digits of the hash, to name a file or folder."""
    return key[:16] + key[64:]


class Curve(BaseModel):
    """The progress of a run, with one value per epoch."""

    model_config = ConfigDict(frozen=True)

    epoch: list[int] = []
    step: list[int] = []
    valid_ppl: list[float] = []
    train_ppl: list[float | None] = []  # without noise
    seconds: list[float] = []  # since the start: CPU time on a CPU, wall-clock time elsewhere
    # Old records call it "judging".
    evaluation: list[float] = Field([], validation_alias=AliasChoices("evaluation", "judging"))
    """The seconds that the evaluation after each epoch took."""


class Record(BaseModel):
    """The result of a run, and everything that is needed to repeat it."""

    model_config = ConfigDict(frozen=True)

    config: dict[str, Any]
    probe: str | None
    key: str
    seed: int
    best_valid_ppl: float
    best_epoch: int
    test_ppl: float | None  # at the epoch with the best validation perplexity
    ended: str  # why the run ended: "epochs", "max_steps", "patience" or "diverged"
    steps: int
    seconds: float  # of the whole run, measured as in the curve
    parameters: int
    curve: Curve
    probed: dict[str, float]
    versions: dict[str, str]
    machine: dict[str, Any]
    commit: str | None
    finished: str  # when the run ended, in UTC

    @property
    def training_seconds(self) -> list[float]:
        """The seconds of training up to the end of each epoch, without evaluation."""
        times = zip(self.curve.seconds, accumulate(self.curve.evaluation), strict=True)
        return [seconds - evaluation for seconds, evaluation in times]


class Records:
    """The records in a folder, by key. Adding the first record creates the folder.

    The key is computed again from the record's config, and not read from its file name. So a record
    stays valid when the config gets a new option with a default.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[str, Record] = {}
        self.stale: list[Path] = []
        """Files that are ignored, because their config has options that no longer exist."""
        for path in sorted(folder.glob("*.json")):
            record = _read(path)
            try:
                self._records[run_key(Config.parse(record.config), record.probe)] = record
            except ConfigError:
                self.stale.append(path)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def get(self, key: str) -> Record | None:
        """Return the record with that key, or None."""
        return self._records.get(key)

    def add(self, record: Record) -> None:
        """Write a record; a record that exists stays as it is."""
        with naming_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{short_key(record.key)}.json"
        if not path.exists():
            write_json(path, record.model_dump(mode="json"))
        self._records.setdefault(record.key, record)


def _read(path: Path) -> Record:
    try:
        return Record.model_validate(read_json(path))
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        raise RunError(
            f"{path} is not a record, because its {field!r} is missing or wrong: delete the file to "
            "repeat the run."
        ) from error
