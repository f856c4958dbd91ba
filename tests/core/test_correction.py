"""The first-order correction: against plain loops, exact where logits are small, nothing where nothing is missing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd import MaMeConfig, plan_merge
from mame_sd.core.correction import first_order


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(n: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of two heads, keys and values neither centred nor alike."""
    return drawn(1, 2, 10, 8), drawn(1, 2, n, 8, seed=1) + 0.7, drawn(1, 2, n, 8, seed=2) - 1.3


def means(t: Tensor) -> Tensor:
    """Of every four tokens."""
    return t.unflatten(2, (-1, 4)).mean(3)


def test_equals_plain_loops() -> None:
    query, key, value = parts(24)
    sizes = torch.tensor([3.0, 1.0, 10.0, 10.0], dtype=torch.float64)
    kept = [0, 5, 11, 23]
    found = first_order(query, key, value, key[:, :, kept], value[:, :, kept], sizes, 0.3)

    def mean_and_covariance(h: int, rows: list[int], weights: list[float]) -> tuple[Tensor, Tensor]:
        total = sum(weights)
        mean_k = sum((w / total * key[0, h, r] for r, w in zip(rows, weights, strict=True)), torch.zeros(8))
        mean_v = sum((w / total * value[0, h, r] for r, w in zip(rows, weights, strict=True)), torch.zeros(8))
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
    """Halving the logits quarters the error that is left, and halves it at most without the correction."""
    query, key, value = parts()
    kept_key, kept_value = (means(key), means(value)) if form == "means" else (key[:, :, ::4], value[:, :, ::4])
    sizes = torch.full((16,), 4.0, dtype=torch.float64)
    errors = []
    for scale in (1e-2, 5e-3):
        whole = F.scaled_dot_product_attention(query, key, value, scale=scale)
        fewer = F.scaled_dot_product_attention(query, kept_key, kept_value, scale=scale)
        corrected = fewer + first_order(query, key, value, kept_key, kept_value, sizes, scale)
        errors.append(((corrected - whole).norm().item(), (fewer - whole).norm().item()))
    (before, plain_before), (after, plain_after) = errors
    assert before / after == pytest.approx(4, rel=0.1)
    assert plain_before / plain_after < 2.2
    assert after < plain_after / 20


def test_is_nothing_where_every_key_is_kept() -> None:
    query, key, value = parts()
    found = first_order(query, key, value, key, value, torch.ones(64), 0.35)
    assert found.abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near_full(dtype: torch.dtype) -> None:
    query, key, value = parts()
    sizes = torch.full((16,), 4.0, dtype=torch.float64)
    whole = first_order(query, key, value, key[:, :, ::4], value[:, :, ::4], sizes, 0.35)
    q, k, v = (t.to(dtype) for t in (query, key, value))
    found = first_order(q, k, v, k[:, :, ::4], v[:, :, ::4], sizes, 0.35)
    assert found.dtype == dtype
    assert (found.double() - whole).norm() < 0.02 * whole.norm()


def test_gradients() -> None:
    query, key, value = (t.requires_grad_() for t in parts(12))
    sizes = torch.full((3,), 4.0, dtype=torch.float64)

    def corrected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return first_order(q, k, v, means(k), v[:, :, ::4], sizes, 0.35)

    assert torch.autograd.gradcheck(corrected, (query, key, value))


@pytest.mark.parametrize("weights", ["average", "best", "pick"])
@pytest.mark.parametrize("keep", [0.25, 0.4])
def test_sizes_of_a_plan_count_every_token_once(weights: str, keep: float) -> None:
    config = MaMeConfig(keep=keep, stride=(2, 2), weights=weights, merge="kv", redraw=False)  # type: ignore[arg-type]
    plan = plan_merge(drawn(2, 1 + 256, 16).float(), config, (16, 16), special=1)
    assert plan.sizes.shape[-1] == plan.tokens_kept
    torch.testing.assert_close(plan.sizes.sum(-1), torch.full(plan.sizes.shape[:-1], 257.0))
    assert (plan.sizes[..., 0] == 1).all()
    assert (plan.sizes >= 1).all()
