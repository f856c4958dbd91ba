"""The kernel distance against sums by hand and other implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mame_sd.eval.metrics.kid import kid, kid_exact
from tests.builders.metrics import features, generator


def test_kid_of_all_images_is_torchmetrics_and_the_sum_by_hand() -> None:
    from torchmetrics.image.kid import poly_mmd

    a, b = features(40, 16, 1).double(), features(40, 16, 2, 0.2).double()
    one, two, cross = ((x @ y.T / 16 + 1) ** 3 for x, y in ((a, a), (b, b), (a, b)))
    by_hand = (one.sum() - one.trace() + two.sum() - two.trace()) / (40 * 39) - 2 * cross.mean()
    assert kid_exact(a, b) == pytest.approx(by_hand.item(), rel=1e-9)
    assert kid_exact(a, b) == pytest.approx(poly_mmd(a, b).item(), rel=1e-9)
    everything = kid(a, b, subsets=3, subset_size=40)
    assert everything.mean == pytest.approx(kid_exact(a, b), rel=1e-9)
    assert (everything.std, everything.subsets, everything.subset_size) == (0, 1, 40)
    one_side = kid(a, b[:30], subsets=3, subset_size=1000)
    assert (one_side.subsets, one_side.subset_size) == (3, 30)


def test_kid_by_subsets_is_near_the_exact_one() -> None:
    a, b = features(300, 16, 1), features(250, 16, 2, 0.3)
    exact, drawn = kid_exact(a, b), kid(a, b, subsets=50, subset_size=100)
    assert (drawn.subsets, drawn.subset_size) == (50, 100)
    assert abs(drawn.mean - exact) < 4 * drawn.std / 50**0.5


def test_kid_in_chunks_is_kid_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = features(50, 8, 1), features(37, 8, 2)
    whole = kid_exact(a, b)
    monkeypatch.setattr("mame_sd.eval.metrics.kid.CHUNK", 7)
    assert kid_exact(a, b) == pytest.approx(whole, rel=1e-12)


def test_pairs_are_unbiased_only_without_their_cross_terms() -> None:
    """The mean over many draws of two same-prompt sets of ONE distribution must be 0; left in,
    cross terms pull it below.
    """
    with_cross, without = [], []
    for seed in range(200):
        a = features(20, 8, seed)
        b = a + 0.05 * torch.randn(a.shape, generator=generator(seed + 1000))
        with_cross.append(kid_exact(a, b))
        without.append(kid_exact(a, b, paired=True))
    assert max(with_cross) < 0
    spread = np.std(without) / len(without) ** 0.5
    assert abs(np.mean(without)) < 4 * spread + 0.01 * abs(np.mean(with_cross))


def test_kid_draws_from_its_own_generator() -> None:
    a, b = features(50, 8, 1), features(60, 8, 2)
    state = torch.get_rng_state()
    first = kid(a, b, subsets=5, subset_size=20, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    assert kid(a, b, subsets=5, subset_size=20, seed=3) == first
    assert kid(a, b, subsets=5, subset_size=20, seed=4) != first
    assert kid(a, b).subset_size == 50


def test_kid_refuses_what_it_cannot_compare() -> None:
    a = features(10, 4, 1)
    for other, why in (
        (a[:1], "at least 2"),
        (features(10, 5, 1), "at least 2"),
        (a * float("nan"), "finite"),
    ):
        with pytest.raises(ValueError, match=why):
            kid(a, other)
    with pytest.raises(ValueError, match="expected pairs, got 10 and 9"):
        kid_exact(a, a[:9], paired=True)
    with pytest.raises(ValueError, match="at least 1 subset of 2"):
        kid(a, a, subset_size=1)
