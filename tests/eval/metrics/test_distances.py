"""Distances of sets and the Inception score, compared with closed forms and other packages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.inception import InceptionScore
from torchmetrics.image.kid import KernelInceptionDistance, poly_mmd

from mame_sd.eval.metrics.frechet import frechet_distance
from mame_sd.eval.metrics.inception_score import inception_score
from mame_sd.eval.metrics.kernel import kernel_distance
from tests.builders import seeded
from tests.builders.metrics import features, oracle


@pytest.mark.parametrize(("n", "m", "dims"), [(400, 300, 16), (60, 500, 32), (2, 3, 5)])
def test_frechet_is_scipys_square_root(n: int, m: int, dims: int) -> None:
    from scipy.linalg import sqrtm

    a, b = features(n, dims, 1).double(), features(m, dims, 2, 0.3).double()
    cov_a, cov_b = np.cov(a.numpy(), rowvar=False), np.cov(b.numpy(), rowvar=False)
    gap = ((a.mean(0) - b.mean(0)) ** 2).sum().item()
    expected = gap + np.trace(cov_a) + np.trace(cov_b) - 2 * np.trace(sqrtm(cov_a @ cov_b).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-5 if n == 2 else 1e-9)


def test_frechet_refuses_what_it_cannot_compare() -> None:
    a = features(10, 4, 1)
    for other, why in (
        (a[:1], "at least 2 images"),
        (a / 0, "finite"),
        (features(10, 5, 1), "equal feature dims"),
    ):
        with pytest.raises(ValueError, match=why):
            frechet_distance(a, other)


class Given(nn.Module):
    """A network for torchmetrics that returns the features that it is given."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def test_distances_and_the_inception_score_are_torch_fidelitys_and_clean_fids() -> None:
    a, b = seeded.feature_sets()
    expected = oracle("distances")
    score = inception_score(4 * a, splits=3, seed=None)
    torchmetrics = FrechetInceptionDistance(feature=Given(a.shape[1]))
    torchmetrics.update(a.double(), real=True)
    torchmetrics.update(b.double(), real=False)
    assert frechet_distance(a, b) == pytest.approx(torchmetrics.compute().item(), rel=1e-6)
    assert frechet_distance(a, b) == pytest.approx(expected["fid"], rel=1e-6)
    assert frechet_distance(a, b) == pytest.approx(expected["fid of clean-fid"], rel=1e-6)
    assert list(score) == pytest.approx(expected["isc"], rel=1e-6)


def test_inception_score_draws_from_its_own_generator_and_refuses_nan() -> None:
    logits = 5 * seeded.uniform("logits", (40, 12))
    state = torch.get_rng_state()
    assert inception_score(logits) == inception_score(logits)
    assert inception_score(logits, seed=1) != inception_score(logits, seed=2)
    assert torch.equal(state, torch.get_rng_state())
    for wrong, why in (
        (logits[:9], "at least 10 images"),
        (logits / 0, "finite"),
        (logits[0], "logits"),
    ):
        with pytest.raises(ValueError, match=why):
            inception_score(wrong)


def test_the_kernel_distance_is_torchmetrics_and_has_no_bias() -> None:
    a, b = features(40, 8, 1).double(), features(30, 8, 2, 0.3).double()
    expected = poly_mmd(a[:30], b).item()
    assert kernel_distance(a[:30], b) == pytest.approx(expected, rel=1e-9)
    halves = [kernel_distance(*features(40, 8, seed).double().chunk(2)) for seed in range(60)]
    assert abs(np.mean(halves)) < 3 * np.std(halves) / 60**0.5
    with pytest.raises(ValueError, match="at least 2 images"):
        kernel_distance(a[:1], b)


def test_torchmetrics_still_can_not_do_what_own_code_is_for() -> None:
    """If this test fails, torchmetrics may replace our code."""
    a, b = seeded.feature_sets()
    kid = KernelInceptionDistance(feature=Given(a.shape[1]), subsets=1, subset_size=len(a))
    kid.update(a, real=True)
    kid.update(b[:-1], real=False)
    with pytest.raises(ValueError, match="subset_size"):  # sets of two sizes
        kid.compute()
    score = InceptionScore(feature=nn.Identity(), splits=3)
    score.update(4 * a)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, deviation = score.compute()
    published = (4 * a)[torch.randperm(len(a), generator=torch.Generator().manual_seed(0))]
    mean, std = inception_score(published, splits=3, seed=None)
    assert first.item() == pytest.approx(mean, rel=1e-2)  # parts of other sizes
    assert deviation.item() > 1.1 * std
