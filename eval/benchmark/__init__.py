"""Benchmarks of generation: suites, rows, timing, gates and results."""
