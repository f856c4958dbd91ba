"""Judge whether an instrument (a model, its prompts and steps) can tell methods apart.

If every merged layer's output is its mean over all tokens, attention carries no spatial
information. An instrument that hardly changes then can't rank methods, because all of them lie
between that and the unmerged image.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..results.schema import MethodResult, Value

LPIPS_FLOOR = 0.10  # of mean attention, at least
RIVAL_LPIPS = 0.01  # at least
INTERVAL_SHARE = 0.1  # of its LPIPS, which the width of the interval stays below
MORE = "take more (--num)"


def sensitivity(rows: Sequence[MethodResult], floor: str, rival: str) -> str:
    """Say on one line what mean attention and the rival do to the images, and what follows.

    Args:
        rows: Rows with `lpips`, if measured.
        floor: Name of mean attention.
        rival: Name of the rival at 50 %.
    """
    lpips = {row.name: value for row in rows if (value := row.values.get("lpips", Value())).known}
    head = "Sensitivity of this instrument: "
    if floor not in lpips:
        return f"{head}not measured (needs {floor})."
    parts, lacking = [], []
    few: list[bool] = []  # of each LPIPS that is too low: whether more prompts might raise it
    for name, least in ((floor, LPIPS_FLOOR), (rival, RIVAL_LPIPS)):
        if name not in lpips:
            lacking.append(f"{name}: not measured")
            continue
        mean, high = lpips[name].mean or 0.0, lpips[name].high
        parts.append(f"{name}: LPIPS {mean:.4f} (at least {least:.2f})")
        if mean < least:
            parts[-1] += ", MISSED"
            few.append(high is None or high >= least)
    wide = False
    if rival in lpips and lpips[rival].interval is None:
        lacking.append(f"the interval of {rival}: not measured")
    elif rival in lpips:
        low, high = lpips[rival].interval or (0.0, 0.0)
        mean = lpips[rival].mean or 0.0
        share = (high - low) / mean if mean else float("inf")
        wide = share >= INTERVAL_SHARE
        parts.append(f"its 95 % interval {share:.0%} of it wide (below {INTERVAL_SHARE:.0%})")
        parts[-1] += ", MISSED" * wide
    if few:
        verdict = "FAILS: it can't tell these methods apart"
        verdict += f" by so few prompts; {MORE}" * all(few)
    elif wide:
        verdict = f"can tell large differences, and has too few prompts for small ones; {MORE}"
    else:
        verdict = "passes as far as measured" if lacking else "PASSES"
    return f"{head}{verdict}. {'; '.join([*parts, *lacking])}."
