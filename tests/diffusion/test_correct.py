"""The first-order correction in a UNet's self-attention: what it computes, where it can't, and what
it is good for.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    SlicedAttnProcessor,
)
from torch import Tensor

from mame_sd import MaMeAttnProcessor, MaMeConfig, plan_merge
from mame_sd.config import Study

CONFIG = MaMeConfig(
    keep=0.25,
    study=Study(stride=(2, 2), weights="pick", correct=True, redraw=False),
    merge="kv",
    min_tokens=1,
)


def attention() -> Attention:
    torch.manual_seed(0)
    return Attention(16, heads=2, dim_head=8).double().eval()


def tokens(seed: int = 1, count: int = 64) -> Tensor:
    return torch.randn(
        2, count, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def loops(attn: Attention, x: Tensor, config: MaMeConfig) -> Tensor:
    """Attention over kept keys, and what they lack of the mean and covariance of all, sample by
    sample and head by head.
    """
    plan = plan_merge(x, config, (8, 8))
    assert plan.tokens_kept < 64
    q, k, v = (linear(x) for linear in (attn.to_q, attn.to_k, attn.to_v))
    fewer_k, fewer_v = plan.merge(k), plan.merge(v)
    out = torch.zeros_like(q)
    for b in range(x.shape[0]):
        share = torch.full(
            (plan.tokens_kept,), 1 / plan.tokens_kept, dtype=torch.float64
        )  # no logit is shifted: all weigh alike
        weight = torch.zeros_like(share)
        if plan.uneven:
            share, weight = plan.sizes[b] / 64, plan.sizes[b].log()
        for h in (slice(0, 8), slice(8, 16)):
            keys, values, kept_k, kept_v = (
                k[b, :, h],
                v[b, :, h],
                fewer_k[b, :, h],
                fewer_v[b, :, h],
            )
            mean, mean_kept = values.mean(0), share @ kept_v
            covariance = sum(torch.outer(values[i], keys[i]) for i in range(64)) / 64 - torch.outer(
                mean, keys.mean(0)
            )
            if config.weights == "best":  # what varies within the groups is estimated
                sizes = plan.sizes[b] / 64
                covariance = sum(
                    sizes[i] * torch.outer(kept_v[i], kept_k[i]) for i in range(len(sizes))
                )
                covariance = covariance - torch.outer(mean, keys.mean(0))
                drawn = plan.positions.sample.tolist()
                halves = [torch.zeros(8, 8, dtype=torch.float64) for _ in range(2)]
                for n, i in enumerate(drawn):
                    row = int(plan.rows[b, i])
                    halves[n % 2] += torch.outer(values[i] - kept_v[row], keys[i] - kept_k[row]) / (
                        len(drawn) / 2
                    )
                within = (halves[0] + halves[1]) / 2
                agree = (halves[0] * halves[1]).sum() / within.square().sum()
                covariance = covariance + within * agree.clamp(0, 1)
            kept = sum(share[i] * torch.outer(kept_v[i], kept_k[i]) for i in range(len(share)))
            kept = kept - torch.outer(mean_kept, share @ kept_k)
            for i in range(64):
                near = torch.softmax(kept_k @ q[b, i, h] * 8**-0.5 + weight, 0) @ kept_v
                out[b, i, h] = near + mean - mean_kept + 8**-0.5 * (covariance - kept) @ q[b, i, h]
    return attn.to_out[0](out)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weights": "best"},
        {"weights": "best", "keep": 0.4},
        {"weights": "average", "keep": 0.4},
    ],
    ids=str,
)
def test_equals_loops(fields: dict[str, object]) -> None:
    attn, x, config = attention(), tokens(), CONFIG.replace(**fields)
    with torch.no_grad():
        found = MaMeAttnProcessor(config, inner=AttnProcessor2_0())(attn, x)
        torch.testing.assert_close(found, loops(attn, x, config), rtol=1e-9, atol=1e-9)
        assert not torch.allclose(
            found, MaMeAttnProcessor(config.replace(correct=False))(attn, x), atol=1e-4
        )


@pytest.mark.parametrize("weights", ["best", "pick"])
def test_fused_projections_give_the_same(weights: str) -> None:
    attn, x, config = attention(), tokens(), CONFIG.replace(weights=weights)
    with torch.no_grad():
        apart = MaMeAttnProcessor(config)(attn, x)
        attn.fuse_projections()
        torch.testing.assert_close(
            MaMeAttnProcessor(config, inner=FusedAttnProcessor2_0())(attn, x), apart
        )


@pytest.mark.parametrize(
    "inner", [AttnProcessor(), SlicedAttnProcessor(2)], ids=lambda p: type(p).__name__
)
def test_processors_that_hide_their_keys_are_not_corrected_and_say_so(inner: object) -> None:
    attn, x = attention(), tokens()
    processor = MaMeAttnProcessor(CONFIG, inner=inner)
    with torch.no_grad():
        found = processor(attn, x)
        torch.testing.assert_close(found, MaMeAttnProcessor(CONFIG.replace(correct=False))(attn, x))
    (layer,) = processor.report().layers
    assert layer.merged
    assert (
        f"not corrected: {type(inner).__name__} calls no scaled_dot_product_attention of"
        " PyTorch's own" in layer.reason
    )


@pytest.mark.parametrize(("weights", "left"), [("average", 0.35), ("best", 0.5), ("pick", 0.35)])
def test_it_brings_mild_attention_much_nearer(weights: str, left: float) -> None:
    attn, x = attention(), tokens(count=1024)
    with torch.no_grad():
        whole = attn(x)
        config = CONFIG.replace(weights=weights)
        errors = [
            (MaMeAttnProcessor(config.replace(correct=c))(attn, x) - whole).norm()
            for c in (False, True)
        ]
    assert errors[1] < left * errors[0]


def test_it_brings_whole_merged_tokens_nearer_too() -> None:
    attn, x = attention(), tokens(count=1024)
    with torch.no_grad():
        whole = attn(x)
        config = CONFIG.replace(weights="best", merge="qkv")
        plan = plan_merge(x, config, (32, 32))
        errors = [
            (plan.merge(MaMeAttnProcessor(config.replace(correct=c))(attn, x) - whole)).norm()
            for c in (False, True)
        ]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("weights", ["best", "pick"])
def test_gradients_flow_to_all_keys(weights: str) -> None:
    attn, x, config = attention(), tokens().requires_grad_(), CONFIG.replace(weights=weights)
    output = MaMeAttnProcessor(config)(attn, x)
    (found,) = torch.autograd.grad(output.square().sum(), x)
    (expected,) = torch.autograd.grad(loops(attn, x, config).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("weights", ["best", "pick"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, weights: str) -> None:
    attn, x, config = (
        attention().to(dtype).double(),
        tokens().to(dtype).double(),
        CONFIG.replace(weights=weights),
    )
    with torch.no_grad():
        whole = MaMeAttnProcessor(config)(attn, x)
        half = MaMeAttnProcessor(config)(attn.to(dtype), x.to(dtype))
    assert half.dtype == dtype
    assert (half.double() - whole).norm() < 0.03 * whole.norm()


def test_other_forms_of_attention_stay_as_they_are() -> None:
    """Attention with a mask, or over other keys than the layer's, is not corrected."""
    from mame_sd.diffusion.families.keys import MergedKeys
    from mame_sd.diffusion.layer import Tokens

    q, k, v = (torch.randn(1, 2, 16, 4) for _ in range(3))
    plan = plan_merge(torch.randn(1, 16, 8), CONFIG, (4, 4))
    mask = torch.randn(16, 16)
    with MergedKeys(plan, Tokens((4, 4)), (1, 16), correct=True) as keys:
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        other = F.scaled_dot_product_attention(q[:, :, :8], k, v)
        assert keys.seen
    kept = plan.kept
    expected = F.scaled_dot_product_attention(
        q, k[:, :, kept], v[:, :, kept], attn_mask=mask[:, kept]
    )
    torch.testing.assert_close(masked, expected)
    assert torch.equal(other, F.scaled_dot_product_attention(q[:, :, :8], k, v))


@pytest.mark.parametrize(
    "inner",
    [AttnProcessor(), SlicedAttnProcessor(2), AttnProcessor2_0()],
    ids=lambda p: type(p).__name__,
)
def test_keys_of_groups_and_keys_of_their_own_are_weighed_everywhere(inner: object) -> None:
    """Tokens of which many are alike: counted as often as they stand for tokens, keys give nearly
    what all of them give.
    """
    attn, directions = attention(), tokens(2, 6)[:, :, :].repeat_interleave(1, 0)
    x = directions[
        :, torch.randint(6, (64,), generator=torch.Generator().manual_seed(0)).sort().values
    ]
    config = MaMeConfig(
        tau=0.99, study=Study(stride=(2, 2), redraw=False, correct=False), min_tokens=1
    )
    plan = plan_merge(x, config, (8, 8))
    assert plan.uneven or plan.sizes.unique().numel() > 1
    with torch.no_grad():
        whole, found = attn(x), MaMeAttnProcessor(config.replace(keep=0.4), inner=inner)(attn, x)
        alike = attn(
            x, encoder_hidden_states=plan_merge(x, config.replace(keep=0.4), (8, 8)).merge(x)
        )
    assert (found - whole).norm() < 0.2 * (alike - whole).norm()


def test_an_attention_put_in_pytorchs_place_is_given_merged_keys_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attn, x, config = attention(), tokens(), CONFIG.replace(weights="best")
    with torch.no_grad():
        expected = MaMeAttnProcessor(config.replace(correct=False))(attn, x)
        original = F.scaled_dot_product_attention
        monkeypatch.setattr(
            F, "scaled_dot_product_attention", lambda *args, **kwargs: original(*args, **kwargs)
        )
        processor = MaMeAttnProcessor(config)
        torch.testing.assert_close(processor(attn, x), expected)
    assert "not corrected" in processor.report().layers[0].reason


def test_another_call_within_the_processor_is_left_as_it_is() -> None:
    class Twice(AttnProcessor2_0):
        def __call__(
            self, attn: Attention, hidden_states: Tensor, *args: object, **kwargs: object
        ) -> Tensor:
            few = hidden_states[:, :5].unflatten(2, (2, 8)).transpose(1, 2)
            assert F.scaled_dot_product_attention(few, few, few).shape == few.shape
            return super().__call__(attn, hidden_states, *args, **kwargs)  # type: ignore[arg-type]

    attn, x, config = attention(), tokens(), CONFIG.replace(weights="best")
    with torch.no_grad():
        expected = MaMeAttnProcessor(config)(attn, x)
        assert torch.equal(MaMeAttnProcessor(config, inner=Twice())(attn, x), expected)
