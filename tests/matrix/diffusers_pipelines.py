"""The section on the tiny pipelines of diffusers' own tests, from the record of
`python -m scripts.robustness.diffusers_suite --pipelines`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

RECORD = Path(__file__).with_name("diffusers_pipelines.json")
HEAD = """## diffusers' own pipelines

`python -m scripts.robustness.diffusers_suite --pipelines` builds the tiny pipelines of diffusers'
tests. Each runs three times: unmerged, with `tau=1`, and with `keep=0.5, min_tokens=1`. A pipeline
*merged* where a layer merged, the output is finite, and `tau=1` equals the unmerged output to
rounding. Text encoders and tokenizers of the hub have tiny stand-ins. A pipeline that can't be
built or run without its own is *not tried*; its denoiser has a row above.
"""


def _reason(why: str) -> str:
    """A message without the error's name and the advice at its end."""
    return why.partition(": ")[2].partition(": remove")[0]


def section() -> list[str]:
    """Its lines."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    merged = [row for row in rows if row["outcome"] == "merged"]
    others = [row for row in rows if row["outcome"] in ("left", "refused", "wrong", "failed")]
    rest = [row for row in rows if row["outcome"] in ("not built", "not run")]
    names = Counter(row["pipeline"].removesuffix("Pipeline") for row in merged)
    every = [f"{name} ({n} tests)" if n > 1 else name for name, n in sorted(names.items())]
    untried = sorted({row["pipeline"].removesuffix("Pipeline") for row in rest} - names.keys())
    lines = [
        HEAD,
        f"Of {len(merged) + len(others)} that run {len(merged)} merged:",
        "",
        "| what | pipelines |",
        "|---|---|",
        f"| merged | {', '.join(every)} |",
        f"| not tried ({len(untried)}) | {', '.join(untried)} |",
        "",
        "| others | what | why |",
        "|---|---|---|",
    ]
    lines += [f"| {row['pipeline']} | {row['outcome']} | {_reason(row['why'])} |" for row in others]
    return [*lines, ""]
