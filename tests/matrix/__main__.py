"""`python -m tests.matrix > docs/compatibility.md` prints the page. `--sweep` instead runs every
model and writes what happened, then runs every cell of the page as a test.
"""

import sys

import pytest

from tests.matrix.models.sweep import sweep
from tests.matrix.table import page

if "--sweep" in sys.argv:
    sweep()
    sys.exit(pytest.main(["-m", "not training", "tests/test_matrix.py", "tests/test_models.py"]))
else:
    print(page(), end="")
