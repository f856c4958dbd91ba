"""The report of a benchmark: results.json and the images beside it become pages and tables to look
at.

- report.html: one self-contained file: headline, pictures, tables, plots, gates, manifest
- table.csv: every figure with its interval, one line for each row
"""

from .headline import summary
from .render import render

__all__ = ["render", "summary"]
