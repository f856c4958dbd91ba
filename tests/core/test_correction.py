"""The first-order correction: against plain loops, exact where logits are small, nothing where
nothing is missing.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd import MaMeConfig, plan_merge
from mame_sd.config import Study
from mame_sd.core.correction import (
    apart_from,
    first_order,
    first_order_of_means,
    joined,
    moments,
    within_groups,
)
from mame_sd.core.owners import owners_of
from mame_sd.diffusion.families.keys import corrected


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(n: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of two heads, keys and values neither centred nor alike."""
    return drawn(1, 2, 10, 8), drawn(1, 2, n, 8, seed=1) + 0.7, drawn(1, 2, n, 8, seed=2) - 1.3


def means(t: Tensor) -> Tensor:
    """Of every four tokens."""
    return t.unflatten(2, (-1, 4)).mean(3)


def correction(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept_key: Tensor,
    kept_value: Tensor,
    sizes: Tensor,
    scale: float,
) -> Tensor:
    lacking, shift = first_order(moments(key, value), moments(kept_key, kept_value, sizes))
    assert shift is not None
    return query @ (scale * lacking).transpose(-1, -2).to(query.dtype) + shift


def test_equals_plain_loops() -> None:
    query, key, value = parts(24)
    sizes = torch.tensor([3.0, 1.0, 10.0, 10.0], dtype=torch.float64)
    kept = [0, 5, 11, 23]
    found = correction(query, key, value, key[:, :, kept], value[:, :, kept], sizes, 0.3)

    def mean_and_covariance(h: int, rows: list[int], weights: list[float]) -> tuple[Tensor, Tensor]:
        total = sum(weights)
        mean_k = sum(
            (w / total * key[0, h, r] for r, w in zip(rows, weights, strict=True)), torch.zeros(8)
        )
        mean_v = sum(
            (w / total * value[0, h, r] for r, w in zip(rows, weights, strict=True)), torch.zeros(8)
        )
        covariance = torch.zeros(8, 8, dtype=torch.float64)
        for r, w in zip(rows, weights, strict=True):
            covariance += w / total * torch.outer(value[0, h, r] - mean_v, key[0, h, r] - mean_k)
        return mean_v, covariance

    for h in range(2):
        mean, covariance = mean_and_covariance(h, list(range(24)), [1.0] * 24)
        mean_kept, covariance_kept = mean_and_covariance(h, kept, sizes.tolist())
        for i in range(10):
            expected = mean - mean_kept + 0.3 * (covariance - covariance_kept) @ query[0, h, i]
            torch.testing.assert_close(found[0, h, i], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["means", "picks"])
def test_is_exact_to_first_order(form: str) -> None:
    """Halving the logits quarters the error that is left, and halves it at most without the
    correction.
    """
    query, key, value = parts()
    kept_key, kept_value = (
        (means(key), means(value)) if form == "means" else (key[:, :, ::4], value[:, :, ::4])
    )
    sizes = torch.full((16,), 4.0, dtype=torch.float64)
    errors = []
    for scale in (1e-2, 5e-3):
        whole = F.scaled_dot_product_attention(query, key, value, scale=scale)
        fewer = F.scaled_dot_product_attention(query, kept_key, kept_value, scale=scale)
        corrected = fewer + correction(query, key, value, kept_key, kept_value, sizes, scale)
        errors.append(((corrected - whole).norm().item(), (fewer - whole).norm().item()))
    (before, plain_before), (after, plain_after) = errors
    assert before / after == pytest.approx(4, rel=0.1)
    assert plain_before / plain_after < 2.2
    assert after < plain_after / 20


def test_is_nothing_where_every_key_is_kept() -> None:
    query, key, value = parts()
    found = correction(query, key, value, key, value, torch.ones(64), 0.35)
    assert found.abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near_full(dtype: torch.dtype) -> None:
    query, key, value = parts()
    sizes = torch.full((16,), 4.0, dtype=torch.float64)
    whole = correction(query, key, value, key[:, :, ::4], value[:, :, ::4], sizes, 0.35)
    q, k, v = (t.to(dtype) for t in (query, key, value))
    found = correction(q, k, v, k[:, :, ::4], v[:, :, ::4], sizes, 0.35)
    assert found.dtype == dtype
    assert (found.double() - whole).norm() < 0.02 * whole.norm()


def test_gradients() -> None:
    query, key, value = (t.requires_grad_() for t in parts(12))
    sizes = torch.full((3,), 4.0, dtype=torch.float64)

    def corrected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return correction(q, k, v, means(k), v[:, :, ::4], sizes, 0.35)

    assert torch.autograd.gradcheck(corrected, (query, key, value))


@pytest.mark.parametrize("weights", ["average", "best", "pick"])
@pytest.mark.parametrize("keep", [0.25, 0.4])
def test_sizes_of_a_plan_count_every_token_once(weights: str, keep: float) -> None:
    config = MaMeConfig(
        keep=keep, study=Study(stride=(2, 2), weights=weights, redraw=False), merge="kv"
    )  # type: ignore[arg-type]
    plan = plan_merge(drawn(2, 1 + 256, 16).float(), config, (16, 16), special=1)
    assert plan.sizes.shape[-1] == plan.tokens_kept
    torch.testing.assert_close(plan.sizes.sum(-1), torch.full(plan.sizes.shape[:-1], 257.0))
    assert (plan.sizes[..., 0] == 1).all()
    assert (plan.sizes >= 1).all()


@pytest.mark.parametrize("weights", ["average", "best"])
@pytest.mark.parametrize("chosen", [{"keep": 0.25}, {"keep": 0.6}, {"tau": 0.3}])
@pytest.mark.parametrize(
    ("lead", "size", "tiles"), [((), (16, 16), 0), ((2,), (10, 13), 4), ((2, 3), (16, 16), 4)]
)
def test_what_merged_tokens_hold_in_all_is_what_went_in(
    weights: str, chosen: dict[str, float], lead: tuple[int, ...], size: tuple[int, int], tiles: int
) -> None:
    config = MaMeConfig.from_dict(
        {**chosen, "stride": (2, 2), "weights": weights, "redraw": False, "tiles": tiles}
    )
    generator = torch.Generator().manual_seed(1)
    length = 1 + size[0] * size[1]
    plan = plan_merge(torch.randn(*lead, length, 4, generator=generator), config, size, special=1)
    t = torch.rand(*lead, length, generator=generator)
    found = plan.summed(t)
    assert found.shape == (*lead, plan.tokens_kept)
    torch.testing.assert_close(found.sum(-1), t.sum(-1))
    if weights == "best":
        rows = plan.rows.view(*lead, length)
        for at in range(plan.tokens_kept):
            torch.testing.assert_close(found[..., at], (t * (rows == at)).sum(-1))
    for wrong in (t[..., 1:], t.repeat(2, *[1] * len(lead))):
        with pytest.raises(ValueError, match="expected a tensor of shape"):
            plan.summed(wrong)


@pytest.mark.parametrize("special", [0, 1])
@pytest.mark.parametrize("keep", [0.25, 0.4])
def test_moments_drawn_from_every_token_are_the_moments(keep: float, special: int) -> None:
    """Groups' means, sizes and what varies within them hold all there is; so rows and sizes are
    right too.
    """
    config = MaMeConfig(
        keep=keep, study=Study(stride=(2, 2), weights="best", redraw=False), merge="kv", tiles=8
    )
    x = drawn(2, special + 256, 16)
    plan = plan_merge(x, config, (16, 16), special=special)
    key = drawn(2, special + 256, 8, seed=1)
    value = 2 * key - 1.3
    kept_key, kept_value = plan.merge(key), plan.merge(value)
    # every token twice, so that both halves of the sample see all of them
    twice = torch.arange(special + 256).repeat(2)
    between = moments(kept_key, kept_value, plan.sizes)
    means = joined(kept_key, kept_value)
    apart = apart_from(means, joined(key[:, twice], value[:, twice]), plan.rows[:, twice])
    every = moments(key, value)
    for proportional, kept in ((True, between), (False, moments(kept_key, kept_value))):
        given = None if proportional else means, plan.sizes, special + 256
        found, expected = first_order_of_means(apart, 8, *given), first_order(every, kept)
        torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-9, atol=1e-9)
        shift = torch.zeros(()).double() if found.shift is None else found.shift
        torch.testing.assert_close(
            shift.expand_as(expected.shift), expected.shift, rtol=1e-9, atol=1e-9
        )
    owners = plan.kept.expand(2, -1).gather(1, plan.rows)
    assert torch.equal(owners, owners_of(plan))


@pytest.mark.parametrize("alike", [True, False], ids=["values follow keys", "values are noise"])
def test_a_sample_tells_what_the_means_lack_and_adds_little_noise(alike: bool) -> None:
    config = MaMeConfig(
        keep=0.25, study=Study(stride=(2, 2), weights="best", redraw=False), merge="kv", tiles=16
    )
    key, noise = drawn(1, 1024, 16), drawn(1, 1024, 16, seed=1)
    value = key + noise if alike else noise
    plan = plan_merge(key, config, (32, 32))
    kept_key, kept_value = plan.merge(key), plan.merge(value)
    between = moments(kept_key, kept_value, plan.sizes)
    whole, none = moments(key, value).covariance, between.covariance
    generator, errors = torch.Generator().manual_seed(0), []
    for _ in range(50):
        at = torch.randperm(1024, generator=generator)[:128]
        given = joined(key[:, at], value[:, at]), plan.rows[:, at], key.shape[-1]
        found = within_groups(joined(kept_key, kept_value), *given)
        errors.append((none + found - whole).norm().item())
    lacks = (whole - none).norm().item()
    assert max(errors) < (0.6 if alike else 1.8) * lacks
    assert sum(errors) / 50 < (0.5 if alike else 1.2) * lacks


def test_one_token_tells_nothing() -> None:
    key, value = drawn(1, 4, 8), drawn(1, 4, 8, seed=1)
    rows = torch.zeros(1, 1, dtype=torch.long)
    drawn_too = joined(key[:, :1] + 1, value[:, :1] - 1)
    assert not within_groups(joined(key, value), drawn_too, rows, 8).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_of_many_large_tokens_stays_in_range(dtype: torch.dtype) -> None:
    key, value = drawn(1, 4096, 8) * 20, drawn(1, 4096, 8, seed=1) * 20
    found = moments(key.to(dtype), value.to(dtype)).covariance
    assert found.dtype == torch.float32
    assert (found - moments(key, value).covariance).norm() < 0.02 * moments(
        key, key
    ).covariance.norm()


def test_a_covariance_beyond_half_precisions_range_stays_finite() -> None:
    tall = (drawn(1, 64, 8) * 1000).half()
    few = tall[:, ::4]
    lacks = first_order(moments(tall, tall), moments(few, few))
    assert not lacks.covariance.half().isfinite().all()
    call = {"query": few, "scale": 1e-6}
    assert (
        corrected(F.scaled_dot_product_attention, call, lacks, key=few, value=few).isfinite().all()
    )
