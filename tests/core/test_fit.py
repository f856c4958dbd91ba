"""Test fitted values: they solve their equation, and stay finite and local."""

from __future__ import annotations

import torch
from torch import Tensor

from mame_sd.core.fit import sized_keys, solve_values


def case(m: int, kept: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [2, 3, m, K], values [2, 3, K, 5] and exact outputs [2, 3, m, 5]."""
    generator = torch.Generator().manual_seed(0)
    logits, values, exact = (
        torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)
        for shape in ((m, kept), (kept, 5), (m, 5))
    )
    weights = (3 * logits).softmax(-1).to(dtype)
    return weights, values.to(dtype), exact.to(dtype)


def test_queries_that_see_no_merged_key_change_nothing() -> None:
    a, v, exact = case(6, 20)
    a[..., 3:] = 0
    assert torch.equal(solve_values(a, v, exact, 3, 20), v)
    single = solve_values(*(t.float() for t in (a, v, exact)), 3, 20)
    assert single.isfinite().all()


def test_equal_queries_and_sharp_attention_stay_finite() -> None:
    a, v, exact = case(8, 20, torch.float32)
    a = torch.zeros_like(a)
    a[..., 0] = 1  # all queries see one key: the matrix has rank 1
    fitted = solve_values(a, v, exact, 0, 20)
    assert fitted.isfinite().all()
    torch.testing.assert_close(fitted[:, :, 1:], v[:, :, 1:])


def test_keys_carry_sizes_to_queries_that_share_a_direction() -> None:
    """Logits rise by the log of a group's size, also for queries outside the regression."""
    generator = torch.Generator().manual_seed(0)
    q, mean, key = (
        torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64) for n in (64, 1, 20)
    )
    q = 3 * mean + 0.3 * q
    log_sizes = torch.arange(1, 41, dtype=torch.float64).view(2, 20).log()
    log_sizes[:, 5] = 0
    sized = sized_keys(key.clone(), q[:, :, ::2], q[:, :, :0], log_sizes, 0.4)
    assert torch.equal(sized[:, :, 5], key[:, :, 5])
    raised = 0.4 * q[:, :, 1::2] @ (sized - key).mT
    assert (raised - log_sizes[:, None, None]).norm() < 0.1 * raised.norm()
    torch.testing.assert_close(sized_keys(key.clone(), 0 * q, q[:, :, :0], log_sizes, 0.4), key)
    half = sized_keys(key.half(), 1e-5 * q.half(), q[:, :, :0].half(), log_sizes.float(), 0.4)
    assert half.dtype == torch.float16
    assert half.isfinite().all()


def test_queries_next_to_the_image_weigh_as_much_as_its_own() -> None:
    """Ten queries of a text weigh as much as 64 of the image, as if each came 6.4 times."""
    generator = torch.Generator().manual_seed(0)
    image, text = (
        1 + torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64) for n in (64, 10)
    )
    every = torch.cat([image.repeat(1, 1, 10, 1), text.repeat(1, 1, 64, 1)], 2)
    key, log_sizes = torch.zeros(2, 3, 4, 8, dtype=torch.float64), torch.ones(2, 4).double()
    found = sized_keys(key.clone(), image, text, log_sizes, 0.4)
    torch.testing.assert_close(
        found, sized_keys(key.clone(), every, every[:, :, :0], log_sizes, 0.4)
    )
    assert not torch.allclose(found, sized_keys(key.clone(), image, text[:, :, :0], log_sizes, 0.4))
