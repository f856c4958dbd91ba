"""Bad input and edges that every setting must survive: sizes, ranges of 16 bits, constant images,
single samples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mame_sd import MaMeConfig, apply_mame, plan_merge, remove_mame
from mame_sd.config import Study
from tests.builders.tiny import run_unet, tiny_unet, unet_inputs
from tests.builders.tokens import detail_of

FORMS: list[dict[str, Any]] = [
    {"keep": 0.5},
    {"keep": 0.5, "merge": "qkv"},
    {"keep": 0.5, "merge": "qkv", "weights": "best", "tiles": 0},
    {"keep": 0.5, "partition": "alternating", "tiles": 0},
    {"keep": 0.25},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_a_constant_image_keeps_its_share_and_comes_back(
    fields: dict[str, Any], dtype: torch.dtype
) -> None:
    x = (
        torch.randn(3, 1, 40, generator=torch.Generator().manual_seed(0))
        .to(dtype)
        .expand(3, 256, 40)
    )
    plan = plan_merge(x, MaMeConfig.from_dict(fields), (16, 16))
    assert plan.tokens_kept == fields["keep"] * 256 if fields.get("partition") is None else 128
    rtol = max(1e-5, torch.finfo(dtype).eps)  # of a sum of 129 equal tokens
    detail = detail_of(x, MaMeConfig.from_dict(fields), (16, 16))
    torch.testing.assert_close(plan.restore(plan.merge(x), detail), x, rtol=rtol, atol=0)


def test_a_mean_stays_between_what_it_is_a_mean_of() -> None:
    x = torch.randn(2, 256, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    plan = plan_merge(x, MaMeConfig(keep=0.25, tiles=4), (16, 16))
    y = plan.merge(x)
    assert bool((y.amax(1) <= x.amax(1)).all())
    assert bool((y.amin(1) >= x.amin(1)).all())


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_large_half_precision_features_stay_finite(fields: dict[str, Any]) -> None:
    x = (
        (1e4 * torch.randn(2, 256, 16, generator=torch.Generator().manual_seed(1)))
        .clamp(-6e4, 6e4)
        .half()
    )
    plan = plan_merge(x, MaMeConfig.from_dict(fields), (16, 16))
    y = plan.merge(x)
    assert bool(plan.weights.isfinite().all())
    assert bool(y.isfinite().all())
    assert bool(
        plan.restore(y, detail_of(x, MaMeConfig.from_dict(fields), (16, 16))).isfinite().all()
    )
    same = plan_merge((x.float() * 1e-4).half(), MaMeConfig.from_dict(fields), (16, 16))
    assert (plan.preserved == same.preserved).float().mean() > 0.95, (
        "cosine does not depend on the scale"
    )


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_a_tile_larger_than_the_image_is_no_tile(fields: dict[str, Any]) -> None:
    x = torch.randn(1, 54, 16, generator=torch.Generator().manual_seed(2))
    whole = plan_merge(x, MaMeConfig.from_dict({**fields, "tiles": 0}), (6, 9))
    wide = plan_merge(x, MaMeConfig.from_dict({**fields, "tiles": 64}), (6, 9))
    assert torch.equal(wide.weights, whole.weights)
    assert torch.equal(wide.merge(x), whole.merge(x))


@pytest.mark.parametrize("fields", [*FORMS, {"tau": 0.5}, {"preset": "plain"}], ids=str)
def test_an_image_of_one_token_is_left_as_it_is(fields: dict[str, Any]) -> None:
    x = torch.randn(2, 1, 8)
    plan = plan_merge(x, MaMeConfig.from_dict(fields), (1, 1))
    assert plan.tokens_kept == 1
    assert torch.equal(
        plan.restore(plan.merge(x), detail_of(x, MaMeConfig.from_dict(fields), (1, 1))), x
    )


def test_a_budget_below_the_destinations_keeps_the_destinations() -> None:
    x = torch.randn(1, 256, 8)
    assert (
        plan_merge(x, MaMeConfig(keep=0.001, study=Study(stride=(2, 2))), (16, 16)).tokens_kept
        == 64
    )
    assert plan_merge(x, MaMeConfig(keep=0.001), (16, 16)).tokens_kept == 16


@pytest.mark.parametrize("fields", FORMS[:2], ids=str)
def test_a_sample_alone_and_among_others_gives_the_same(fields: dict[str, Any]) -> None:
    unet = tiny_unet()
    apply_mame(unet, MaMeConfig.from_dict({**fields, "min_tokens": 16}))
    with torch.no_grad():
        both = run_unet(unet, batch=2)
        inputs = unet_inputs(unet, batch=2)
        alone = unet(
            inputs["sample"][:1], inputs["timestep"], inputs["encoder_hidden_states"][:1]
        ).sample
    torch.testing.assert_close(alone, both[:1], rtol=1e-4, atol=1e-5)


def test_sizes_may_change_between_calls() -> None:
    unet = tiny_unet()
    sizes = [(16, 16), (16, 24), (8, 16), (16, 16)]
    apply_mame(unet, keep=0.5, min_tokens=16)
    live = [run_unet(unet, height=h, width=w) for h, w in sizes]
    for (h, w), output in zip(sizes, live, strict=True):
        remove_mame(unet)
        apply_mame(unet, keep=0.5, min_tokens=16)
        assert torch.equal(run_unet(unet, height=h, width=w), output)
