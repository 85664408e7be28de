"""``python -m undrop``: the command line without the installed script."""

from __future__ import annotations

import logging
import os
import sys

from undrop.lab.cli import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # Under torchrun: if a gloo thread frees a tensor while the interpreter shuts down, the process
        # aborts (pytorch issue 190489), and a finished run would look like a failed one.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
