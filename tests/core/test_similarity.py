"""Similarity where a GPU would round it: TF32 must not decide what merges."""

from __future__ import annotations

import pytest
import torch

from mame_sd.config import MaMeConfig, Study
from mame_sd.core.partition import positions
from mame_sd.core.similarity import similarity_of, split_for_tf32, to_tf32


def unit_tokens() -> torch.Tensor:
    """[2, 96, 320] tokens of length 1, near one another as trained features are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, 320, generator=generator) + 0.5 * torch.randn(
        2, 96, 320, generator=generator
    )
    return x / x.norm(dim=-1, keepdim=True)


def test_split_factors_survive_roundingto_tf32() -> None:
    dst, src = unit_tokens().chunk(2, 1)
    exact = dst.double() @ src.double().transpose(1, 2)

    def error(a: torch.Tensor, b: torch.Tensor) -> float:
        product = to_tf32(a).double() @ to_tf32(b).double().transpose(
            1, 2
        )  # as tensor cores see them
        return float((product - exact).abs().max())

    assert error(dst, src) > 1e-4
    assert error(*split_for_tf32(dst, src)) < 2**-21


def test_split_factors_have_gradients() -> None:
    dst, src = (part.clone().requires_grad_() for part in unit_tokens().chunk(2, 1))
    grads = []
    for a, b in ((dst, src), split_for_tf32(dst, src)):
        grads.append(torch.autograd.grad((a @ b.transpose(1, 2)).square().sum(), (dst, src)))
    for exact, split in zip(*grads, strict=True):
        torch.testing.assert_close(split, exact, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_fp32_where_tf32_is_allowed() -> None:
    x, config = unit_tokens(), MaMeConfig(tau=0.8, study=Study(partition="alternating"))
    exact = similarity_of(x.double(), positions(96, config, None, x.device), "cosine")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = similarity_of(x.cuda(), positions(96, config, None, torch.device("cuda")), "cosine")
    finally:
        torch.set_float32_matmul_precision(before)
    assert float((found.cpu().double() - exact).abs().max()) < 1e-6
