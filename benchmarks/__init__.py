"""Speed and quality of merging beside its rivals: `python -m benchmarks.attention`, `.terrain`,
`.frontier`.

Every benchmark checks its methods before it times them, warms up, times them interleaved. It prints
a table of medians with quartiles and ends with one line of JSON that names the machine and the
versions.
"""
