"""Weights of networks: which files, from where, checked by their digests."""
