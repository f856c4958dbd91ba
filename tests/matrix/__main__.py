"""`python -m tests.matrix > docs/compatibility.md` prints the page; `--sweep` first runs every
model and writes what happened.
"""

import sys

from tests.matrix.models.sweep import sweep
from tests.matrix.table import page

if "--sweep" in sys.argv:
    sweep()
else:
    print(page(), end="")
