"""The inception score against closed forms and other implementations, and all distances on the same
features.
"""

from __future__ import annotations

import pytest
import torch

from mame_sd.eval.metrics.frechet import frechet_distance
from mame_sd.eval.metrics.inception_score import inception_score
from tests.builders import seeded
from tests.builders.metrics import oracle


def test_distances_and_the_inception_score_are_torch_fidelitys_and_clean_fids() -> None:
    a, b = seeded.feature_sets()
    expected = oracle("distances")
    score = inception_score(4 * a, splits=3, seed=None)
    assert frechet_distance(a, b) == pytest.approx(expected["fid"], rel=1e-6)
    assert frechet_distance(a, b) == pytest.approx(expected["fid of clean-fid"], rel=1e-6)
    assert list(score) == pytest.approx(expected["isc"], rel=1e-6)


@pytest.mark.parametrize("splits", [1, 5])
def test_sure_and_even_answers_score_the_number_of_classes_up_to_the_cap(splits: int) -> None:
    logits = 1000 * torch.eye(10).repeat(4, 1)
    mean, std = inception_score(logits, splits, seed=None)
    assert mean == pytest.approx(min(10, 40 / splits))
    assert std == pytest.approx(0, abs=1e-9)
    assert inception_score(torch.zeros(40, 10))[0] == pytest.approx(1)


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
