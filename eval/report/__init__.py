"""Make the report of a benchmark, report.html, from results.json and its images.

It is one file that fetches nothing: headline, pictures, plot, tables, gates, manifest.
"""

from .headline import summary
from .render import render

__all__ = ["render", "summary"]
