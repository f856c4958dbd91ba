"""Compute means and medians with their uncertainty.

Means have a bootstrap over prompts, paired differences a sign-flip test. Images of one prompt are
not independent, so prompts, not images, are drawn and flipped. Everything is seeded and sorted by
key: the same values give the same figures in any order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 10_000
EXACT_PROMPTS = 14  # at most so many prompts are flipped in all 2^n ways
_CHUNK = 1_000  # resamples at once: memory stays below 1,000 x prompts numbers

Floats = NDArray[np.float64]


def mean_interval(values: Mapping[str, float], prompts: Mapping[str, str]) -> dict[str, Any]:
    """Compute the mean of per-image values and its 95 % bootstrap interval over prompts.

    Percentiles of resampled means are too narrow for few prompts: 2.5 and 97.5 % contain the mean
    of 8 normal values in about 86 % of cases. So they are taken further out, as far as Student's t
    is from a normal variable (the expanded percentile, Hesterberg, arXiv 1411.5279): 93 %. For two
    or three prompts no percentile reaches far enough.

    Args:
        values: values by image key. Infinite ones (PSNR of equal images) are counted as "equal" and
            excluded from the mean, which is infinite only if all of them are.
        prompts: prompt id of each key.

    Returns:
        "mean", "low", "high" and "n", the number of images; "equal" if some are infinite; "note",
        the reason why there is no interval.

    Raises:
        ValueError: there are no values, or NaN.
    """
    if not values or any(math.isnan(value) for value in values.values()):
        raise ValueError(f"expected numbers to average, got {'NaN' if values else 'none'}")
    finite = {key: value for key, value in values.items() if math.isfinite(value)}
    equal = len(values) - len(finite)
    interval: dict[str, Any] = {"mean": math.inf, "low": None, "high": None, "n": len(values)}
    if equal:
        interval["equal"] = equal
    if not finite:
        return interval
    sums, counts = _by_prompt(finite, prompts)
    interval["mean"] = float(sums.sum() / counts.sum())
    if len(sums) == 1:
        return {**interval, "note": "no interval: one prompt, needs two"}
    rng = np.random.default_rng(0)
    means = []
    for _ in range(RESAMPLES // _CHUNK):
        drawn = rng.integers(0, len(sums), (_CHUNK, len(sums)))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), _expanded(len(sums)))
    return {**interval, "low": float(low), "high": float(high)}


def _expanded(n: int) -> tuple[float, float]:
    """Return the levels of the percentiles of `n` values' resampled mean that give LEVEL."""
    from scipy.stats import t

    quantile = t.ppf((1 + LEVEL) / 2, n - 1)
    tail = NormalDist().cdf(-quantile * math.sqrt(n / (n - 1)))
    return tail, 1 - tail


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Compute the median of independent values, at least one, and its 95 % interval (low, high).

    The interval is that of the sign test, whatever the distribution. Below 6 values it is their
    range, which contains the median with less certainty: in 75 % of cases for 3 values, in 94 % for
    5.

    >>> median_interval([3.0, 1.0, 2.0]), median_interval(range(1, 10))
    ((2.0, 1.0, 3.0), (5.0, 2.0, 8.0))
    """
    ordered, n = sorted(map(float, values)), len(values)
    from scipy.stats import binom

    cut = max(0, int(binom.ppf((1 - LEVEL) / 2, n, 0.5)) - 1)
    return float(np.median(ordered)), ordered[cut], ordered[n - 1 - cut]


def paired_difference(
    values: Mapping[str, float], others: Mapping[str, float], prompts: Mapping[str, str]
) -> dict[str, Any]:
    """Compute the mean of `values` - `others` by key, its interval and its p-value.

    Args:
        values: values by image key.
        others: the other values by the same keys.
        prompts: prompt id of each key.

    Returns:
        What `mean_interval` returns, and "p", two-sided, of the difference being 0 by
        `sign_flip_p`. The mean and p are None if values are infinite.

    Raises:
        ValueError: the keys differ.
    """
    if values.keys() != others.keys():
        raise ValueError(
            f"expected the same images on both sides, got {len(values)} and {len(others)} with"
            " other keys"
        )
    if any(math.isinf(value) for value in [*values.values(), *others.values()]):
        note = "no p-value: infinite values"
        return {"mean": None, "low": None, "high": None, "n": len(values), "note": note, "p": None}
    gaps = {key: values[key] - others[key] for key in values}
    return {**mean_interval(gaps, prompts), "p": sign_flip_p(_by_prompt(gaps, prompts)[0])}


def sign_flip_p(sums: Floats) -> float:
    """Return the p-value of |sum| under random signs of each entry of `sums` [n].

    Up to n = 14 all 2^n signs are tried, otherwise 10,000 are drawn. Then the observed signs count
    as one more draw, so that p is never 0 (Phipson and Smyth, 2010).
    """
    observed = abs(float(sums.sum()))
    margin = 1e-12 * float(np.abs(sums).sum())  # flips that are equal up to rounding count
    if len(sums) <= EXACT_PROMPTS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(sums))))
        return float((np.abs(signs @ sums) >= observed - margin).mean())
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(RESAMPLES // _CHUNK):
        signs = rng.choice((1.0, -1.0), (_CHUNK, len(sums)))
        hits += int((np.abs(signs @ sums) >= observed - margin).sum())
    return (hits + 1) / (RESAMPLES + 1)


def wilson(successes: int, n: int) -> dict[str, Any]:
    """Return a share in per cent with Wilson's 95 % interval (1927), valid at 0 and 100 % too.

    >>> {key: round(value, 1) for key, value in wilson(9, 10).items()}
    {'mean': 90.0, 'low': 59.6, 'high': 98.2, 'n': 10}

    Raises:
        ValueError: there are no trials, or more successes than trials.
    """
    from scipy.stats import binomtest

    low, high = binomtest(successes, n).proportion_ci(LEVEL, "wilson")
    return {"mean": 100 * successes / n, "low": float(100 * low), "high": float(100 * high), "n": n}


def mcnemar_p(ours: Sequence[bool], others: Sequence[bool]) -> float:
    """Return the two-sided p-value of McNemar's exact test of two shares on the same cases.

    >>> mcnemar_p([True] * 3 + [False], [False] * 3 + [False])
    0.25
    """
    from scipy.stats import binomtest

    pairs = list(zip(ours, others, strict=True))
    better = sum(a and not b for a, b in pairs)
    worse = sum(b and not a for a, b in pairs)
    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def _by_prompt(values: Mapping[str, float], prompts: Mapping[str, str]) -> tuple[Floats, Floats]:
    """Return the sum and the number of each prompt's values, [prompts] each, sorted by id."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for key in sorted(values):
        prompt = prompts[key]
        sums[prompt] = sums.get(prompt, 0.0) + values[key]
        counts[prompt] = counts.get(prompt, 0) + 1
    order = sorted(sums)
    return np.array([sums[name] for name in order]), np.array(
        [counts[name] for name in order], np.float64
    )
