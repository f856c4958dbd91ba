"""Images of an embedded model under any method, its denoiser's seconds, and the work of its
self-attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from mame_sd.eval.timing import synchronize
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.model_files import ModelChoice


def load(device: torch.device, dtype: torch.dtype, model: str = "embedded-unet") -> LoadedModel:
    """An embedded model, its pipeline quiet, without a progress bar."""
    return load_model(
        ModelChoice(model=model, device=str(device), dtype=str(dtype).removeprefix("torch."))
    )


def generate(
    model: LoadedModel,
    prompts: list[str],
    steps: int,
    first_seed: int = 0,
    output: str = "np",
    **more: Any,
) -> np.ndarray:
    """One image a prompt, uint8 [n, H, W, 3], seeds counted from `first_seed`; latents are not
    decoded with "latent".

    `more` goes to the pipeline as it is.
    """
    generators = [torch.Generator().manual_seed(first_seed + i) for i in range(len(prompts))]
    images = model.pipe(
        prompts,
        num_inference_steps=steps,
        guidance_scale=model.guidance,
        generator=generators,
        output_type=output,
        **more,
    ).images
    return np.rint(images * 255).astype(np.uint8) if output == "np" else images


@dataclass
class Clock:
    """Seconds spent inside a module's forward, as `now` counts them."""

    now: Callable[[], float] = time.perf_counter
    seconds: float = 0.0
    _start: float = field(default=0.0, repr=False)
    _depth: int = field(default=0, repr=False)  # of calls within a call, which are part of it


@contextmanager
def clocked(
    module: torch.nn.Module, now: Callable[[], float] = time.perf_counter
) -> Iterator[Clock]:
    """Adds up the seconds of every forward of `module` in the block."""
    clock, device = Clock(now), next(module.parameters()).device

    def start(*_: Any) -> None:
        clock._depth += 1
        if clock._depth == 1:
            synchronize(device)
            clock._start = clock.now()

    def stop(*_: Any) -> None:
        clock._depth -= 1
        if not clock._depth:
            synchronize(device)
            clock.seconds += clock.now() - clock._start

    handles = [module.register_forward_pre_hook(start), module.register_forward_hook(stop)]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


class AttentionWork(TorchFunctionMode):
    """Multiplications of self-attention (batch x heads x queries x keys x width) while it is on.

    Calls with `text_tokens` keys are cross-attention and don't count.
    """

    def __init__(self, text_tokens: int) -> None:
        super().__init__()
        self.work = 0
        self._text_tokens = text_tokens

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key = (
                kwargs[name] if name in kwargs else args[i]
                for i, name in enumerate(("query", "key"))
            )
            if key.shape[-2] != self._text_tokens:
                self.work += query.numel() * key.shape[-2]
        return func(*args, **kwargs)
