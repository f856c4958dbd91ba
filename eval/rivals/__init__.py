"""Rivals of merging that run by the library's hooks, and tomesd."""
