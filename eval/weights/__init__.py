"""Weights of the metrics: which files, where from, checked by their digests."""
