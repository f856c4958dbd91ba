"""Whether an instrument (a model, its prompts and steps) can tell methods apart at all.

Where every merged layer's output is its mean over all tokens, attention says nothing of space. An
instrument that hardly minds can't rank methods. All of these lie between that and the unmerged
image.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..results.schema import Row, Value

LPIPS_FLOOR = 0.10  # of mean attention, at least
RETRIEVAL_DROP = 0.20  # of mean attention below the baseline, at least
RIVAL_LPIPS = 0.01  # at least
INTERVAL_SHARE = 0.1  # of its LPIPS, which the width of the interval stays below

Check = tuple[bool, str]


def sensitivity(rows: Sequence[Row], floor: str, rival: str) -> str:
    """One line: what no attention and the rival do to the images, each beside what it has to do,
    and what follows from it.

    Args:
        rows: with `lpips` and `retrieval` as far as measured; the baseline is the first.
        floor: the name of mean attention.
        rival: that of the rival at 50 %.
    """
    found = {row.name: row for row in rows if _mean(row, "lpips") is not None}
    head = "Sensitivity of this instrument: "
    if floor not in found:
        return f"{head}not measured (needs {floor})."
    far, near, lacking = _far(rows[0], found[floor]), _near(found.get(rival)), []
    if rival not in found:
        lacking = [f"{rival}: not measured"]
    elif len(near) < 2:
        lacking = [f"the interval of {rival}: not measured"]
    if not all(ok for ok, _ in [*far, *near[:1]]):
        verdict = "FAILS: it can't tell these methods apart"
    elif not all(ok for ok, _ in near):
        verdict = "can tell large differences, and has too few prompts for small ones"
    else:
        verdict = "passes as far as measured" if lacking or len(far) < 2 else "PASSES"
    parts = [text if ok else f"{text}, MISSED" for ok, text in (*far, *near)]
    return f"{head}{verdict}. {'; '.join([*parts, *lacking])}."


def _far(baseline: Row, floor: Row) -> list[Check]:
    """What mean attention does."""
    lpips = _mean(floor, "lpips") or 0.0
    text = f"{floor.name}: LPIPS {lpips:.4f} (at least {LPIPS_FLOOR:.2f})"
    checks = [(lpips >= LPIPS_FLOOR, text)]
    before, after = _mean(baseline, "retrieval"), _mean(floor, "retrieval")
    if before is not None and after is not None:
        drop = before - after
        text = f"retrieval down {100 * drop:.0f} points (at least {100 * RETRIEVAL_DROP:.0f})"
        checks.append((drop >= RETRIEVAL_DROP - 1e-9, text))
    return checks


def _near(rival: Row | None) -> list[Check]:
    """What the rival does, and how well that is known."""
    if rival is None:
        return []
    value = rival.values["lpips"]
    lpips = value.mean or 0.0
    text = f"{rival.name}: LPIPS {lpips:.4f} (at least {RIVAL_LPIPS:.2f})"
    checks = [(lpips >= RIVAL_LPIPS, text)]
    if value.low is not None and value.high is not None:
        share = (value.high - value.low) / lpips if lpips else float("inf")
        text = f"its 95 % interval {share:.0%} of it wide (below {INTERVAL_SHARE:.0%})"
        checks.append((share < INTERVAL_SHARE, text))
    return checks


def _mean(row: Row, metric: str) -> float | None:
    return row.values.get(metric, Value()).mean
