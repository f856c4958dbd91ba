"""`python -m tests.matrix` writes the tables of docs/compatibility.md.

`--sweep` first records what merges in every model.
"""

import sys

from tests.matrix.models.sweep import sweep
from tests.matrix.table import PAGE, page

if "--sweep" in sys.argv:
    sweep()
PAGE.write_text(page(), encoding="utf-8")
