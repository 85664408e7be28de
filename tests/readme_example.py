"""Run the Python example of a README, for an environment that has nothing but the wheel.

python tests/readme_example.py README.md
"""

import re
import sys
from pathlib import Path

text = Path(sys.argv[1]).read_text(encoding="utf-8")
for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
    exec(compile(block, sys.argv[1], "exec"), {"__name__": "__main__"})
