"""Speed and quality of merging beside its rivals: what prints figures of the documentation's pages.

Every benchmark that times something warms up and times it interleaved.
"""
