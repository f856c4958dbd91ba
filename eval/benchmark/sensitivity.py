"""Whether an instrument (a model, its prompts and steps) can tell methods apart at all.

Where every merged layer's output is its mean over all tokens, attention says nothing of space. An
instrument that hardly minds can't rank methods. All of these lie between that and the unmerged
image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LPIPS_FLOOR = 0.10  # of mean attention, at least
RETRIEVAL_DROP = 0.20  # of mean attention below the baseline, at least
RIVAL_LPIPS = 0.01  # at least
INTERVAL_SHARE = 0.1  # of its LPIPS, which the width of the interval stays below

Check = tuple[bool, str]


def sensitivity(points: Sequence[Mapping[str, Any]], floor: str, rival: str) -> str:
    """One line: what no attention and the rival do to the images, each beside what it has to do,
    and what follows from it.

    Args:
        points: `name`, `lpips` (None: not measured), `lpips_interval` (low and high, or None) and
            `retrieval` (a share, or None) of each method, the baseline's first.
        floor: the name of mean attention.
        rival: that of the rival at 50 %.
    """
    found = {point["name"]: point for point in points if point["lpips"] is not None}
    head = "Sensitivity of this instrument: "
    if floor not in found:
        return f"{head}not measured (needs {floor})."
    far, near, lacking = (
        _far(points[0], found[floor]),
        _near(found.get(rival)),
        _lacking(rival, found.get(rival)),
    )
    if not all(ok for ok, _ in far) or not all(ok for ok, _ in near[:1]):
        verdict = "FAILS: it can't tell these methods apart"
    elif not all(ok for ok, _ in near):
        verdict = "can tell large differences, and has too few prompts for small ones"
    else:
        verdict = "passes as far as measured" if lacking or len(far) < 2 else "PASSES"
    parts = [text if ok else f"{text}, MISSED" for ok, text in (*far, *near)]
    return f"{head}{verdict}. {'; '.join([*parts, *lacking])}."


def _far(baseline: Mapping[str, Any], mean: Mapping[str, Any]) -> list[Check]:
    """What mean attention does."""
    text = f"{mean['name']}: LPIPS {mean['lpips']:.4f} (at least {LPIPS_FLOOR:.2f})"
    checks = [(mean["lpips"] >= LPIPS_FLOOR, text)]
    if baseline.get("retrieval") is not None and mean.get("retrieval") is not None:
        drop = baseline["retrieval"] - mean["retrieval"]
        text = f"retrieval down {100 * drop:.0f} points (at least {100 * RETRIEVAL_DROP:.0f})"
        checks.append((drop >= RETRIEVAL_DROP - 1e-9, text))
    return checks


def _near(rival: Mapping[str, Any] | None) -> list[Check]:
    """What the rival does, and how well that is known."""
    if rival is None:
        return []
    text = f"{rival['name']}: LPIPS {rival['lpips']:.4f} (at least {RIVAL_LPIPS:.2f})"
    checks = [(rival["lpips"] >= RIVAL_LPIPS, text)]
    if rival.get("lpips_interval") is not None:
        low, high = rival["lpips_interval"]
        share = (high - low) / rival["lpips"] if rival["lpips"] else float("inf")
        checks.append(
            (
                share < INTERVAL_SHARE,
                f"its 95 % interval {share:.0%} of it wide (below {INTERVAL_SHARE:.0%})",
            )
        )
    return checks


def _lacking(name: str, rival: Mapping[str, Any] | None) -> list[str]:
    if rival is None:
        return [f"{name}: not measured"]
    return (
        [] if rival.get("lpips_interval") is not None else [f"the interval of {name}: not measured"]
    )
