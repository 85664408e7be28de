"""``python -m undrop``: the command line without the installed script."""

from __future__ import annotations

import logging
import os
import sys

from undrop.lab.cli import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # Under torchrun: a thread of gloo that lets go of a tensor while the interpreter ends aborts the
        # process (pytorch issue 190489), and a run that is over would be taken for one that failed.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
