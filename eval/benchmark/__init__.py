"""The benchmark: suites, methods, interleaved timing, gates, results."""
