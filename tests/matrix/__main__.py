"""`python -m tests.matrix` writes the tables of docs/compatibility.md.

`--sweep` first records what merges in every model, and at the end tests every cell of the page.
"""

import sys

import pytest

from tests.matrix.models.sweep import sweep
from tests.matrix.table import PAGE, page

if "--sweep" in sys.argv:
    sweep()
PAGE.write_text(page(), encoding="utf-8")
if "--sweep" in sys.argv:
    sys.exit(pytest.main(["-m", "not training", "tests/test_matrix.py", "tests/test_models.py"]))
