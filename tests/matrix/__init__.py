"""The compatibility matrix: rows of real diffusers pipelines and features, and their checks.

`rows.py` defines a row, `checks.py` what is checked. `unets.py`, `features.py` and
`transformers.py` contain the rows. `python -m tests.matrix` writes the tables of
docs/compatibility.md, which `tests/test_matrix.py` keeps current.
"""
