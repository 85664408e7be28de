"""Coverage-guided bad bytes: atheris, which is not a dependency, searches for bytes that reach new code.

``pip install atheris``, then ``python -m faults.coverage_guided KIND [-max_total_time=300 ...]`` with
tests/ on the path; KIND is a file of ``faults.fuzz.KINDS``, the rest are libFuzzer's own options. With
a ``TMPDIR`` in memory it is about thirty times as fast.
"""

import sys
import tempfile
from pathlib import Path

import atheris


def main() -> None:
    """Fuzz one kind of file until stopped; the first failure is printed and ends the process."""
    with atheris.instrument_imports(include=["undrop", "tomllib"]):
        from faults import fuzz
    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        kind = fuzz.kinds(folder)[name]
        if kind.sound is None:
            raise SystemExit(f"{name} is no file")
        (folder / "seeds").mkdir()
        (folder / "seeds" / "sound").write_bytes(kind.sound)
        atheris.Setup([sys.argv[0], *options, str(folder / "seeds")], kind.check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
