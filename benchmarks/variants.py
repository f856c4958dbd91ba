"""Ideas that were tried beside the settings of MaMeConfig; each is a point of the frontier, none is
a setting so far.

* size bias: log R_i on the attention logits of a merged key, which stands for R_i tokens (design:
  ToMe's proportional attention);
* protected: the tokens in which the guided and the unguided sample differ most stay, instead of the
  least similar ones;
* schedules: merging in the noisy or in the fine half of the steps only, or with a share that
  changes linearly. They go by the timestep that the UNet is called with, so that they hold under
  any scheduler.

And guidance in two calls of the model, as pipelines of Qwen-Image and Wan have it, on models whose
pipelines call once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor

from mame_sd import MaMeConfig, mame, plan_merge
from mame_sd.core.merge import preserved_of, row_plan
from mame_sd.core.partition import positions, square
from mame_sd.core.plan import Plan
from mame_sd.core.similarity import similarity_of

TRAIN_STEPS = 1000
MakePlan = Callable[[Tensor, MaMeConfig, tuple[int, int]], Plan]


class VariantProcessor:
    """Self-attention of square images with keys and values merged by `plan`; everything else as
    diffusers computes it.

    Args:
        config: the settings that `plan` is made with.
        plan: makes the plan of tokens [B, L, C] that lie as (h, w).
        bias: what log R_i is multiplied by before it is added to the logits of merged key i.
    """

    def __init__(self, config: MaMeConfig, plan: MakePlan, bias: float) -> None:
        self._config, self._plan, self._bias = config, plan, bias
        self._inner = AttnProcessor2_0()

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Any = None, **rest: Any
    ) -> Tensor:
        size = square(hidden_states.shape[1])
        if (
            encoder_hidden_states is not None
            or size is None
            or hidden_states.shape[1] < self._config.min_tokens
        ):
            return self._inner(attn, hidden_states, encoder_hidden_states, **rest)
        plan = self._plan(hidden_states, self._config, size)
        if self._bias:
            rest["attention_mask"] = (
                (self._bias * plan.sizes.log()).to(hidden_states.dtype).unsqueeze(1)
            )
        return self._inner(attn, hidden_states, plan.merge(hidden_states), **rest)


def guidance_protected(x: Tensor, config: MaMeConfig, size: tuple[int, int]) -> Plan:
    """A plan of the guided batch x [2 n, L, d] that keeps the sources in which its two halves
    differ most.
    """
    pos = positions(x.shape[1], config, size, x.device)
    similarity = similarity_of(x, pos, config.metric)
    assert config.keep is not None
    kept = max(pos.M, round(config.keep * pos.L)) - pos.M
    first, second = x.chunk(2)
    apart = (first - second).norm(dim=-1).repeat(2, 1)[:, pos.src]  # [2 n, N]
    protected = pos.src_real[apart.topk(kept).indices]  # [2 n, kept] source slots
    columns = torch.zeros(
        x.shape[0], pos.blocks * pos.n, dtype=torch.bool, device=x.device
    ).scatter(1, protected, True)
    similarity.masked_fill_(
        columns.view(x.shape[0], pos.blocks, 1, pos.n), -2
    )  # below every cosine: last in rank
    best, row = similarity.max(-2)
    return row_plan(row, preserved_of(best, pos, config), pos, 0, x.shape[:1], best.dtype)


def share_at(noisy: tuple[float, ...], fine: tuple[float, ...], t: float) -> float | None:
    """The share to keep at the time t (1: noise, 0: image): between `noisy` and `fine`, or the one
    of t's half; None: no merging.
    """
    if noisy and fine:
        return fine[0] + (noisy[0] - fine[0]) * t
    half = noisy if t > 0.5 else fine
    return half[0] if half else None


@contextmanager
def varied(
    unet: Any, config: MaMeConfig, plan: MakePlan = plan_merge, bias: float = 0.0
) -> Iterator[None]:
    """`unet` with a VariantProcessor for the block; afterwards its own processors are back."""
    before = dict(unet.attn_processors)
    try:
        unet.set_attn_processor(VariantProcessor(config, plan, bias))
        yield
    finally:
        unet.set_attn_processor(before)


@contextmanager
def scheduled(unet: Any, keep_at: Callable[[float], float | None], **fields: Any) -> Iterator[None]:
    """`unet` merging with share `keep_at(t / 1000)` of the timestep t that it is called with; None:
    not at all.

    `fields` are settings of MaMeConfig.
    """

    def note(module: Any, args: Any, kwargs: Any) -> None:
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
        keep = keep_at(float(torch.as_tensor(timestep).max()) / TRAIN_STEPS)
        handle.active = keep is not None
        if keep is not None and keep != handle.config.keep:
            handle.set(keep=keep)

    with mame(unet, MaMeConfig.from_dict(fields)) as handle:
        hook = unet.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def in_two_calls(transformer: Any, config: MaMeConfig | None) -> Iterator[None]:
    """`transformer` merging by `config` (None: not at all), each call of an unguided and a guided
    half made two: the guided one, then the other.
    """
    own, replaced, inside = transformer.forward, "forward" in vars(transformer), False

    def part(value: Any, i: int) -> Any:
        return value.chunk(2)[i] if isinstance(value, Tensor) and value.dim() else value

    def forward(**kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return own(**kwargs)
        inside = True
        try:
            halves = [{name: part(value, i) for name, value in kwargs.items()} for i in (0, 1)]
            same = {
                name: halves[1][name] for name in ("hidden_states", "timestep")
            }  # the very tensors
            guided, unguided = (transformer(**half | same)[0] for half in reversed(halves))
        finally:
            inside = False
        return (torch.cat([unguided, guided]),)

    merging = nullcontext() if config is None else mame(transformer, config)
    with merging:
        transformer.forward = forward
        try:
            yield
        finally:
            if replaced:
                transformer.forward = own
            else:
                del transformer.forward
