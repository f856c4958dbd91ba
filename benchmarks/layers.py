"""One self-attention layer in every form that is compared: plain, merged by tomesd, merged by us,
and the free bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor

from mame_sd import MaMeAttnProcessor, MaMeConfig, plan_merge
from mame_sd.core.detail import Detail
from mame_sd.core.plan import Plan
from mame_sd.core.reference import reference_plan

Layer = Callable[[Tensor], Tensor]  # [B, L, C] to [B, L, C] (free bounds: what is left of it)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
PER_HEAD = 64


def attention(dim: int, device: torch.device, dtype: torch.dtype) -> Attention:
    """A self-attention of Stable Diffusion, heads of 64, seeded random weights."""
    torch.manual_seed(0)
    return Attention(dim, heads=dim // PER_HEAD, dim_head=PER_HEAD).eval().to(device, dtype)


def ours(attn: Attention, config: MaMeConfig, size: tuple[int, int]) -> Layer:
    """`attn` with MaMe + MaRe (or keys and values merged, as `config` says), by the processor that
    users install.
    """
    module = copy.deepcopy(attn)
    module.set_processor(MaMeAttnProcessor(config.replace(size=size, min_tokens=1)))
    return lambda x: module(x)


def planned(attn: Attention, config: MaMeConfig, size: tuple[int, int]) -> Layer:
    """`attn` with keys and values merged by the plan of the first call (the warm-up's): the most
    that reusing plans can win.
    """
    plans: list[Plan] = []

    def layer(x: Tensor) -> Tensor:
        if not plans:
            plans.append(plan_merge(x, config, size))
        output: Tensor = attn(x, encoder_hidden_states=plans[0].merge(x))
        return output

    return layer


def tau_for(share: float, x: Tensor, size: tuple[int, int]) -> float:
    """The threshold that keeps about `share` of the tokens x [B, L, d], to a thousandth; more where
    that many are destinations.
    """
    low, high = -1.0, 1.0
    while high - low > 1e-3:
        tau = (low + high) / 2
        kept = plan_merge(x, MaMeConfig(tau=tau), size).tokens_kept / x.shape[1]
        low, high = (tau, high) if kept < share else (low, tau)
    return low


def free(attn: Attention, kept: int, merge: str) -> Layer:
    """The bound: attention on the first `kept` tokens (or to their keys), as if merging and
    restoring cost nothing.
    """
    if merge == "kv":
        return lambda x: attn(x, encoder_hidden_states=x[:, :kept].contiguous())
    return lambda x: attn(x[:, :kept].contiguous())


def tomesd_layer(attn: Attention, ratio: float, size: tuple[int, int]) -> Layer:
    """`attn` with tomesd's merge and unmerge around it, as its patch of a transformer block does.

    Raises:
        ImportError: tomesd is not installed (`pip install mame-sd[rivals]`).
    """
    from tomesd.merge import bipartite_soft_matching_random2d

    generator = torch.Generator(next(attn.parameters()).device).manual_seed(0)
    h, w = size

    def layer(x: Tensor) -> Tensor:
        merge, unmerge = bipartite_soft_matching_random2d(
            x, w, h, 2, 2, int(x.shape[1] * ratio), no_rand=x.shape[0] % 2 == 1, generator=generator
        )
        output: Tensor = unmerge(attn(merge(x)))
        return output

    return layer


@torch.no_grad()
def gate(
    dim: int, device: torch.device, dtype: torch.dtype, configs: dict[str, MaMeConfig]
) -> dict[str, float]:
    """Relative error of each merged layer against the float64 loops around the same layer, of
    corrected ones against float64 too.

    On an image of 16 x 24 tokens: two tiles, one of them padded.

    Raises:
        SystemExit: an error above the tolerance of `dtype`: no speed is reported for wrong results.
    """
    attn, exact = (
        attention(dim, device, dtype),
        attention(dim, torch.device("cpu"), torch.float32).double(),
    )
    exact.load_state_dict(attn.state_dict())
    x = inputs(2, 16 * 24, dim, device, dtype)()
    wide, errors = x.cpu().double(), {}
    for name, corrected in configs.items():
        config = corrected.replace(correct=False)
        plan = reference_plan(wide, config, (16, 24))
        merged = plan.merge(wide)
        want = (
            exact(wide, encoder_hidden_states=merged)
            if config.merge == "kv"
            else plan.restore(exact(merged), Detail(wide, (16, 24)) if config.detail else None)
        )
        forms = (ours, planned) if config.merge == "kv" else (ours,)
        pairs = [(form(attn, config, (16, 24))(x).cpu().double(), want) for form in forms]
        if corrected.correct:  # whose loops are in the tests
            own, wider = ours(attn, corrected, (16, 24)), ours(exact, corrected, (16, 24))
            pairs.append((own(x).cpu().double(), wider(wide)))
        errors[name] = max(float((got - want).norm() / want.norm()) for got, want in pairs)
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE[dtype]}
    if wrong:
        raise SystemExit(
            f"error: expected results within {TOLERANCE[dtype]} of the float64 loops, got {wrong}; "
            "nothing was timed: mend the merging first"
        )
    return errors


def inputs(
    batch: int, tokens: int, dim: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Makes new tokens [batch, tokens, dim] at every call: neighbours in a row are alike, as in an
    image.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape: Any = (batch, tokens, dim)

    def make() -> Tensor:
        noise = torch.randn(shape, generator=generator, device=device)
        return (noise + noise.roll(1, 1) + noise.roll(math.isqrt(tokens), 1)).to(dtype)

    return make
