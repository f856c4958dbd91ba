"""Make the report of a benchmark from results.json and its images.

- report.html: one self-contained file with headline, pictures, tables, plots, gates, manifest
- table.csv: every figure with its interval, one line per row
"""

from .headline import summary
from .render import render

__all__ = ["render", "summary"]
