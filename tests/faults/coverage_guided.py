"""Coverage-guided bad bytes: atheris, which is not a dependency, searches for bytes that reach new code.

Run ``pip install atheris``, then ``python -m faults.coverage_guided KIND [-max_total_time=300 ...]``
with tests/ on the path. KIND is the name of a kind of file in ``faults.fuzz.KINDS``, and the other
arguments are libFuzzer's options. With a ``TMPDIR`` in memory, the search is about thirty times as fast.
"""

import sys
import tempfile
from pathlib import Path

import atheris


def main() -> None:
    """Fuzz one kind of file until the process is stopped; the first failure also ends it."""
    with atheris.instrument_imports(include=["undrop", "tomllib"]):
        from faults import fuzz
    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kind = fuzz.kinds(folder)[name]
        if kind.valid is None:
            raise SystemExit(f"{name} is not a kind of file")
        (folder / "seeds").mkdir()
        (folder / "seeds" / "valid").write_bytes(kind.valid)
        atheris.Setup([sys.argv[0], *options, str(folder / "seeds")], kind.check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
