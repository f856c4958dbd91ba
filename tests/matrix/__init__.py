"""The compatibility matrix: rows of real diffusers pipelines and features, and the checks each row
must pass.

`rows.py` says what a row is, `checks.py` what is checked, `unets.py`, `features.py` and
`transformers.py` hold the rows; `python -m tests.matrix` writes the tables of
docs/compatibility.md, which `tests/test_matrix.py` keeps current.
"""
