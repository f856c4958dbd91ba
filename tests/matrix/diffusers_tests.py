"""The sections on diffusers' own tests and pipelines, from what was recorded at commit 350f706."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import wrap
from typing import Any

from tests.matrix.markdown import WIDTH, bullet, names_by_reason

FOLDER = Path(__file__).parent
MODES = ("off", "on", "processor", "pipeline", "scaled")
TESTS = """## diffusers' own tests

`git checkout 350f706 && make test-diffusers` ran diffusers' tests (hours; stops and resumes) and
put hooks on every model as it is made (`keep=0.5`, `min_tokens=1`). There were five modes:

- *off*: installed and turned off;
- *on*: merging;
- *processor*: merging by the one-liner, on UNets and PixArt;
- *pipeline*: StableDiffusionMaMePipeline replaces diffusers' own, for Stable Diffusion alone;
- *scaled*: merging, with the weights of queries and keys times 4, so that tiny models attend.

Each cell says how many of the tests that pass in the same setting without merging pass with it. In
*merged* of them (mode *on*) a layer really merged. Some tests need the hub, an accelerator or a
package that is not there. They fail without us too, and are not counted. An empty cell was not run
with that version.
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
PIPELINES = """## diffusers' own pipelines

`git checkout 350f706 && python -m scripts.robustness.diffusers_suite --pipelines` built the tiny
pipelines of diffusers' tests. Each ran three times: unmerged, with `tau=1`, and with `keep=0.5,
min_tokens=1`. Sides double up to three times until there are tokens to merge. Weights that begin as
zeros are drawn, so that attention reaches the output. A pipeline *merged* where tokens merged, the
output changed and is finite, and `tau=1` equals the unmerged output to rounding. Text encoders and
tokenizers of the hub have tiny stand-ins. A pipeline that can't be *built* or *run* without its own
has the reason below; its denoiser has a row above.
"""


def section() -> list[str]:
    """Its lines."""
    found = json.loads((FOLDER / "diffusers_suite.json").read_text(encoding="utf-8"))
    versions = found["versions"]
    lines = [
        TESTS,
        f"The tests of diffusers {versions['tests']}, on diffusers {versions['diffusers']}:",
        "",
        f"| suite | {' | '.join(MODES)} | merged |",
        "|---|" + "---|" * (len(MODES) + 1),
    ]
    for suite, counts in found["suites"].items():
        cells = [_cell(counts.get(mode)) for mode in MODES]
        merged = counts.get("on", {}).get("merged", "")
        lines.append(f"| {suite} | {' | '.join(cells)} | {merged} |")
    lines += ["", FAILURES]
    for why, tests in found["failures"].items():
        lines += bullet(why)
        for test, where in tests.items():
            places = "; ".join(f"{suite} ({n})" for suite, n in where.items())
            lines += bullet(f"{test}: {places}", "  ")
    return [*lines, "", STABLE, *_pipelines()]


def _cell(counts: dict[str, Any] | None) -> str:
    return "" if counts is None else f"{counts['passed']} of {counts['ground']}"


def _pipelines() -> list[str]:
    found = json.loads((FOLDER / "diffusers_pipelines.json").read_text(encoding="utf-8"))
    merged, others = found["merged"], found["others"]
    left = {row["outcome"]: 0 for row in others}
    for row in others:
        left[row["outcome"]] += len(row["pipelines"])
    count = sum(merged.values()) + sum(left.values())
    names = [f"{name} ({n} tests)" if n > 1 else name for name, n in merged.items()]
    reasons = (
        (f"{row['outcome']}: {row['why']}", name) for row in others for name in row["pipelines"]
    )
    return [
        PIPELINES,
        f"Of {count} cases {count - left['not built'] - left['not run']} run, and"
        f" {sum(merged.values())} of those merge:",
        "",
        "```text",
        *wrap(", ".join(names), WIDTH),
        "```",
        "",
        "The others, by what became of them and why:",
        "",
        *names_by_reason(reasons),
        "",
    ]
