"""What merging has to beat, on the library's own path: its hooks and layers, with a rival's plan
instead of ours.

So every rival meets the same calls, the same checks and the same counting, and differs in nothing
but what merges. `rival_on` does that for any `Plan`: keys and values (`merge="kv"`), or whole
tokens that it restores ("qkv"). Their plans stand in `plans.py` and `toma.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig, Study
from mame_sd.core.plan import Plan
from mame_sd.diffusion.apply_denoiser import denoiser_of, mame
from mame_sd.diffusion.families.unet import PlainAttention
from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.diffusion.hook_registry import hook_on
from mame_sd.diffusion.hooks import MergeHook
from mame_sd.diffusion.layer import Layer, LayerCall, Route, Step, Tokens


class Run:
    """What the layers of one model share while a rival is on it: the step of the image, and
    generators of random numbers.

    A step is a change of the timestep; they are counted from 0 since it last went against its
    direction.
    """

    def __init__(self, seed: int = 0) -> None:
        self.choices = random.Random(seed)
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._step = -1
        self._last: float | None = None
        self._up: bool | None = None  # whether timesteps rise from step to step
        self._timestep: Any = None

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook for the model; it does not wait for a GPU, only who asks for `step`
        does.
        """
        self._timestep = kwargs.get("timestep", args[1] if len(args) > 1 else None)

    def generator(self, device: torch.device) -> torch.Generator:
        """Its generator on `device`."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    @property
    def step(self) -> int:
        """Which one it is; to be asked for at each."""
        if self._timestep is not None:
            now, self._timestep = float(torch.as_tensor(self._timestep).float().max()), None
            up = None if self._last in (None, now) else now > (self._last or 0)
            if self._step < 0 or (
                up is not None and self._up not in (None, up)
            ):  # the first one, or back to the first
                self._step, self._up = 0, None
            elif up is not None:
                self._step, self._up = self._step + 1, up
            self._last = now
        return self._step


# (tokens [B, L, C], their (h, w), what the layers share) -> plan
MakePlan = Callable[[Tensor, tuple[int, int], Run], Plan]


class RivalLayer(Layer):
    """A layer that merges by a rival's plan and is `inner` in all else."""

    def __init__(self, inner: Layer, make: MakePlan, run: Run) -> None:
        super().__init__()
        self.inner, self.make, self.run = inner, make, run

    def call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> LayerCall:
        """As `inner`."""
        return self.inner.call(module, forward, args, kwargs)

    def route(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Route | str:
        """What `inner` says; a reason where height and width are unknown, or samples that keep
        tokens of their own can't run together.
        """
        route = self.inner.route(call, known, config)
        if isinstance(route, str):
            return route
        if route.tokens.plane is None:
            return "height and width unknown"
        family = getattr(self.inner, "family", None)
        rotary = config.merge == "qkv" and family is not None and family.select is not None
        if rotary and getattr(self.make, "own_tokens", False) and route.feature.shape[0] > 1:
            return (
                "each sample keeps tokens of its own, and their positions are given once for all"
                " samples"
            )
        return route

    def count(self, call: LayerCall, known: Tokens | None) -> int:
        """As `inner`."""
        return self.inner.count(call, known)

    def plan(self, route: Route, step: Step) -> Plan:
        """The rival's."""
        assert route.tokens.plane is not None
        return self.make(route.feature, route.tokens.plane, self.run)


@contextmanager
def rival_on(
    target: Any,
    make: Callable[[], MakePlan],
    merge: str,
    min_tokens: int = 1024,
    plain_only: bool = False,
    counted: bool = False,
    seed: int = 0,
) -> Iterator[MaMeHandle]:
    """Merging by a rival for a `with` block, in the layers in which ours would merge.

    Args:
        target: what `apply_mame` takes.
        make: called once for each layer, gives what makes its plans.
        merge: "kv" or "qkv".
        min_tokens: layers with fewer are left alone.
        plain_only: the rival can't tell text from an image in one sequence.
        counted: attention counts whole merged tokens beside text, as ours does with "qkv".
        seed: of what the rival draws.

    Raises:
        ValueError: nothing could merge, or `plain_only` and a transformer's attention.
    """
    run = Run(seed)
    # keep=1: all samples of a batch run together, for a rival's plans are not of our partition
    with mame(
        target, keep=1.0, merge=merge, study=Study(correct=counted), min_tokens=min_tokens
    ) as handle:
        noted = denoiser_of(target).register_forward_pre_hook(run.note, with_kwargs=True)
        try:
            for module in denoiser_of(target).modules():
                hook = hook_on(module, MergeHook.name)
                if isinstance(hook, MergeHook):
                    if plain_only and not isinstance(hook.layer, PlainAttention):
                        raise ValueError(
                            "expected self-attention of image tokens alone, got"
                            f" {type(module).__name__}, whose calls hold text too; use a UNet"
                        )
                    hook.layer = RivalLayer(hook.layer, make(), run)
            yield handle
        finally:
            noted.remove()
