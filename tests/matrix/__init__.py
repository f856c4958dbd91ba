"""The compatibility matrix, whose tables `python -m tests.matrix` writes into the docs."""
