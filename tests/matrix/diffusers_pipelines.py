"""The section on the tiny pipelines of diffusers' own tests, from the record of
`python -m scripts.robustness.diffusers_suite --pipelines`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from textwrap import wrap

from tests.matrix.markdown import WIDTH, names_by_reason

RECORD = Path(__file__).with_name("diffusers_pipelines.json")
UNTRIED = ("not built", "not run")
HEAD = """## diffusers' own pipelines

`python -m scripts.robustness.diffusers_suite --pipelines` builds the tiny pipelines of diffusers'
tests. Each runs three times: unmerged, with `tau=1`, and with `keep=0.5, min_tokens=1`. Sides
double up to three times until there are tokens to merge. Weights that begin as zeros are drawn, so
that attention reaches the output. A pipeline *merged* where tokens merged, the output changed and
is finite, and `tau=1` equals the unmerged output to rounding. Text encoders and tokenizers of the
hub have tiny stand-ins. A pipeline that can't be *built* or *run* without its own has the reason
below; its denoiser has a row above.
"""


# What hinders a pipeline from being built, by the error.
_NEEDS = {
    "OSError": "needs an encoder, tokenizer or processor of the hub",
    "ImportError": "needs a package that is not installed",
    "RuntimeError": "needs the hub's own text encoder: the stand-in is of another kind",
    "TypeError": "a class that others fill in",
}


def _reason(row: dict[str, str]) -> str:
    """A message without the error's name, the model's, and the advice at its end."""
    why = row["why"]
    kind, _, message = why.partition(": ")
    if row["outcome"] in UNTRIED and kind in _NEEDS:
        return _NEEDS[kind]
    told = (message or why).partition(": remove")[0]
    return re.sub(r".* does not merge: |.*none did \(\d+ of \d+: (.*)\)", r"\1", told)


def section() -> list[str]:
    """Its lines."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    merged = [row for row in rows if row["outcome"] == "merged"]
    run = [row for row in rows if row["outcome"] not in UNTRIED]
    others = [row for row in rows if row["outcome"] != "merged"]
    names = Counter(row["pipeline"].removesuffix("Pipeline") for row in merged)
    every = [f"{name} ({n} tests)" if n > 1 else name for name, n in sorted(names.items())]
    lines = [
        HEAD,
        f"Of {len(rows)} cases {len(run)} run, and {len(merged)} of those merge:",
        "",
        "```text",
        *wrap(", ".join(every), WIDTH),
        "```",
        "",
        "The others, by what became of them and why:",
        "",
    ]
    why = ((f"{row['outcome']}: {_reason(row)}", row["pipeline"]) for row in others)
    return [*lines, *names_by_reason(why), ""]
