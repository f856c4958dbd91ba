"""Judge whether an instrument (a model, its prompts and steps) can distinguish methods.

If every merged layer returns its mean over all tokens, attention carries no spatial information. An
instrument whose images hardly change then can't rank methods, because all of them lie between that
and the unmerged image.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..results.schema import UNABLE, MethodResult, Value

LPIPS_FLOOR = 0.10  # of mean attention, at least
RIVAL_LPIPS = 0.01  # at least
INTERVAL_SHARE = 0.1  # of its LPIPS, which the width of the interval stays below
MORE = "take more (--num)"
MISSED = "MISSED"
QUESTION = "Can this model and these prompts distinguish methods?"


def sensitivity(rows: Sequence[MethodResult], floor: str, rival: str) -> str:
    """Say on one line whether the images can distinguish methods, and by which figures.

    Args:
        rows: rows with `lpips`, if measured.
        floor: name of mean attention.
        rival: name of the rival at 50 %.
    """
    lpips = {row.name: value for row in rows if (value := row.values.get("lpips", Value())).known}
    labels = {row.name: row.label for row in rows}
    if floor not in lpips:
        return f"{QUESTION} Not measured: no LPIPS of {floor}."
    parts, lacking = [], []
    few: list[bool] = []  # of each LPIPS that is too low: whether more prompts might raise it
    for name, least in ((floor, LPIPS_FLOOR), (rival, RIVAL_LPIPS)):
        if name not in lpips:
            lacking.append(f"{labels.get(name, name)} was not measured")
            continue
        mean, high = lpips[name].mean or 0.0, lpips[name].high
        parts.append(f"{labels[name]} has an LPIPS of {mean:.4f} (needs {least:.2f})")
        if mean < least:
            parts[-1] += f", {MISSED}"
            few.append(high is None or high >= least)
    wide = False
    if rival in lpips and lpips[rival].interval is None:
        lacking.append(f"{labels[rival]} has no interval")
    elif rival in lpips:
        low, high = lpips[rival].interval or (0.0, 0.0)
        mean = lpips[rival].mean or 0.0
        share = (high - low) / mean if mean else float("inf")
        wide = share >= INTERVAL_SHARE
        parts.append(f"the width of its 95 % interval is {share:.0%} (needs {INTERVAL_SHARE:.0%})")
        parts[-1] += f", {MISSED}" * wide
    if few:
        verdict = UNABLE + f" with so few prompts; {MORE}" * all(few)
    elif wide:
        verdict = f"Only large differences: too few prompts for small ones; {MORE}"
    else:
        verdict = "Yes, as far as measured" if lacking else "Yes"
    return f"{QUESTION} {verdict}. {'; '.join([*parts, *lacking])}."
