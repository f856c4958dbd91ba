"""Speed and quality of merging beside its rivals: what prints figures of the documentation's pages.

Every benchmark that times something checks it first, warms up and times it interleaved. It ends
with one line of JSON that names the machine and the versions.
"""
