"""Results of benchmarks: their schema, and reading them."""
