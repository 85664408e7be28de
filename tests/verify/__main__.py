"""Run everything and write ``verify.json`` and ``verify.html``: ``make verify``."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from undrop.files import write_json
from undrop.lab.train.environment import find_device
from undrop.report import Progress, duration


def main() -> int:
    """Return 0 if all is well, else 1."""
    parser = argparse.ArgumentParser(prog="make verify", description=__doc__)
    parser.add_argument("--device", default=os.environ.get("UNDROP_TEST_DEVICE") or "auto")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of the report")
    chosen = parser.parse_args()
    device = chosen.device
    if device in ("auto", "cpu", "cuda", "mps"):
        device = str(find_device(device, "--device"))
    # The tests read it when they are imported; what they compare in float64 mps can't compute.
    os.environ["UNDROP_TEST_DEVICE"] = "cpu" if device == "mps" else device

    from verify import page, parts

    report: dict[str, Any] = parts.machine(device)
    start = time.monotonic()
    with Progress() as progress:
        for name, part in parts.PARTS.items():
            progress.print(f"{name} …")
            report[name] = _attempt(part, device, progress)
            progress.print(f"  {page.summary(name, report[name])}")
    report["seconds"] = time.monotonic() - start
    write_json(chosen.out / "verify.json", report)
    page.write(chosen.out / "verify.html", report)
    print(f"{chosen.out / 'verify.json'} and verify.html, after {duration(report['seconds'])}.")
    return 0 if page.all_well(report) else 1


def _attempt(part: Callable[..., dict[str, Any]], device: str, progress: Progress) -> Any:
    """Run a part; an error becomes part of the report."""
    start = time.monotonic()
    try:
        found = part(device, progress)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return {**found, "seconds": time.monotonic() - start}


if __name__ == "__main__":
    sys.exit(main())
