"""Prints docs/compatibility.md: `python -m tests.matrix > docs/compatibility.md`."""

from tests.matrix.table import page

print(page(), end="")
