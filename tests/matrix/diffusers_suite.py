"""The section on diffusers' own tests, from the counts that `make test-diffusers` writes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.robustness.diffusers_suite.known import reason
from tests.matrix.markdown import bullet

RESULT = Path(__file__).with_name("diffusers_suite.json")
MODES = ("off", "on", "processor", "pipeline", "scaled")
HEAD = """## diffusers' own tests

`make test-diffusers` runs diffusers' tests and puts hooks on every model as it is made
(`keep=0.5`, `min_tokens=1`). There are five modes:

- *off*: installed and turned off;
- *on*: merging;
- *processor*: merging by the one-liner, on UNets and PixArt;
- *pipeline*: StableDiffusionMaMePipeline replaces diffusers' own, for Stable Diffusion alone;
- *scaled*: merging, with the weights of queries and keys times 4, so that tiny models attend.

Each cell says how many of the tests that pass in the same setting without merging pass with it. In
*merged* of them (mode *on*) a layer really merged. Some tests need the hub, an accelerator or a
package that is not there. They fail without us too, and are not counted. An empty cell was not run
with today's version.
"""
FAILURES = """### What fails with merging

Below each reason stand its tests. Each has its mode and its suites, with how many fail there.
"""
STABLE = """### What rounding decides

A source's destination is its nearest. Where two are equally near within rounding, batching,
attention slicing or another device may pick the other one.

`git checkout bcb79fe && python -m benchmarks.choice_stability` perturbs tokens by a relative 1e-6.
Of 8192 choices none
changes for random tokens and 1 for smooth ones. Among exact copies 26 % change, but copies give the
same result. Similarities could be rounded to 2^-20, 2^-16 or 2^-12 and ties decided by position.
That settles copies. Of the smooth tokens' choices 3, 1 and 2 change then, for values at a step's
border become the new ties. It would also be one more pass, so choices stay as they are.

In a tiny SDXL UNet the weights of queries and keys were multiplied by 4. A batch of four against
one, and attention slicing, change none of 7680 choices. Outputs differ by at most 1e-5, as they do
unmerged.

SD 3's `test_fused_qkv_projections` compares calls whose prompts differ. diffusers' tests make T5 in
training mode, where dropout draws anew in every call. Two unmerged images differ by .003, and the
test may fail without us. In eval mode the merged images of fused and unfused projections are
bit-equal. Our stand-in for T5 has no dropout.
"""


def cell(counts: dict[str, Any] | None) -> str:
    return "" if counts is None else f"{counts['passed']} of {counts['ground']}"


def section() -> list[str]:
    """Its lines."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    versions, suites = result["versions"], result["suites"]
    lines = [
        HEAD,
        f"The tests of diffusers {versions['tests']}, on diffusers {versions['diffusers']}:",
        "",
    ]
    modes = [mode for mode in MODES if any(mode in row["counts"] for row in suites)]
    lines += [f"| suite | {' | '.join(modes)} | merged |", "|---|" + "---|" * (len(modes) + 1)]
    for row in suites:
        cells = [cell(row["counts"].get(mode)) for mode in modes]
        merged = row["counts"].get("on", {}).get("merged", "")
        lines.append(f"| {row['suite']} | {' | '.join(cells)} | {merged} |")
    if len(modes) < len(MODES):
        lines += [
            "",
            (
                "Not run with today's version:"
                f" {', '.join(mode for mode in MODES if mode not in modes)}."
            ),
        ]
    return [*lines, "", *failures(suites), "", STABLE]


def failures(suites: list[dict[str, Any]]) -> list[str]:
    """The tests that fail with merging, by the reason; how often, in which suites and mode."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for row in suites:
        for item in row["differences"]:
            why = reason(**item) or "This is not explained yet."
            test = item["test"].rpartition("::")[2].partition("[")[0]
            where = found.setdefault(why, {}).setdefault(f"`{test}`, *{item['mode']}*", Counter())
            where[row["suite"]] += 1
    lines = [FAILURES]
    for why, tests in found.items():
        lines += bullet(why)
        for test, where in tests.items():
            places = "; ".join(f"{suite} ({n})" for suite, n in where.items())
            lines += bullet(f"{test}: {places}", "  ")
    return lines
