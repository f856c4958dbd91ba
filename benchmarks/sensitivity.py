"""Whether an instrument (a model, its prompts and steps) can tell methods apart at all.

Where every merged layer's output is its mean over all tokens, attention says nothing of space: an instrument that hardly minds
can't rank methods, all of which lie between that and the unmerged image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.methods import MEAN_ATTENTION

LPIPS_FLOOR = 0.10  # of mean attention, at least
RETRIEVAL_DROP = 0.20  # of mean attention below the baseline, at least
TOMESD_LPIPS = 0.01  # at least
INTERVAL_SHARE = 0.1  # of its LPIPS, which the width of the interval stays below


def sensitivity(points: Sequence[Mapping[str, Any]], tomesd: str = "tomesd 0.5") -> str:
    """One line: what mean attention and `tomesd` (the row of tomesd at 50 %) do, each beside what it has to; PASSES, FAILS, or what wasn't measured."""
    found = {point["name"]: point for point in points}
    lacking = [name for name in ("baseline", MEAN_ATTENTION, tomesd) if name not in found]
    if tomesd in found and found[tomesd].get("lpips_interval") is None:
        lacking.append(f"the interval of {tomesd}")
    if lacking:
        return f"Sensitivity of this instrument: not measured (needs {', '.join(lacking)}; see --rivals)."
    mean, peer = found[MEAN_ATTENTION], found[tomesd]
    drop = found["baseline"]["retrieval"] - mean["retrieval"]
    low, high = peer["lpips_interval"]
    share = (high - low) / peer["lpips"] if peer["lpips"] else float("inf")
    checks = (
        (mean["lpips"] >= LPIPS_FLOOR, f"{MEAN_ATTENTION}: LPIPS {mean['lpips']:.4f} (at least {LPIPS_FLOOR:.2f})"),
        (
            drop >= RETRIEVAL_DROP - 1e-9,
            f"retrieval down {100 * drop:.0f} points (at least {100 * RETRIEVAL_DROP:.0f})",
        ),
        (peer["lpips"] >= TOMESD_LPIPS, f"{tomesd}: LPIPS {peer['lpips']:.4f} (at least {TOMESD_LPIPS:.2f})"),
        (share < INTERVAL_SHARE, f"its 95 % interval {share:.0%} of it wide (below {INTERVAL_SHARE:.0%})"),
    )
    passed = all(ok for ok, _ in checks)
    verdict = "PASSES" if passed else "FAILS: it can't tell these methods apart"
    return f"Sensitivity of this instrument: {verdict}. " + "; ".join(
        text if ok else f"{text}, MISSED" for ok, text in checks
    ) + "."  # fmt: skip
