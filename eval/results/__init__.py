"""Results of benchmarks: their schema, and the one file that holds them."""
