"""What a row of a classification benchmark does to a model: nothing, merging, a rival's rule,
smaller images.

A method at a knob can be brought to the FLOPs of another one: `at_flops` finds the knob by
counting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.perception.apply_encoder import apply_encoder, encoder_restored
from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.perception.settings import EVERY, LEFT
from mame_sd.runs.methods import NotApplicable

from ..results.schema import Family
from .rivals import counted, embedding_of, on_smaller_images, rival_on
from .rules import EViT, RandomDrop, Rule, ToMe, quarters

HALVINGS = 16  # of the knob's range
# names of sets of blocks: which they are, of so many
BLOCKS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "third": lambda depth: tuple(range(max(1, round(depth / 3)))),
    "first": lambda depth: tuple(range(max(1, round(depth * 2 / 3)))),  # the paper's first 8 of 12
    "all": lambda depth: tuple(range(depth)),
    "quarters": quarters,
}


On = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Method:
    """What a row does to a model; without arguments it leaves it as it is.

    Attributes:
        config: all that decides its answers, as JSON values.
        on: the method on a model for a `with` block, as it is timed.
        counts: `on` gives a handle that counts tokens and FLOPs.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    on: On = nullcontext
    counts: bool = False

    @property
    def merges(self) -> bool:
        """Whether it is merging."""
        return "mame" in self.config

    @contextmanager
    def counted(self, model: nn.Module) -> Iterator[EncoderHandle]:
        """The method on `model` for a `with` block, counting tokens and FLOPs."""
        with self.on(model) as handle:
            if self.counts:
                yield handle
            else:
                with counted(model) as handle:
                    yield handle


def merged(blocks: int | tuple[int, ...] | str | None, **fields: Any) -> Method:
    """Merging, by arguments of `apply_encoder`; `blocks` may be a name of `BLOCKS`."""
    config = {**fields, "blocks": blocks}
    if "tau" not in fields:
        every = {"every": EVERY} if blocks is None else {}
        config["defaults"] = {"left": LEFT, "schedule": "decreasing", **every}

    @contextmanager
    def on(model: nn.Module) -> Iterator[EncoderHandle]:
        depth = len(find_encoder(model)[1])
        chosen = BLOCKS[blocks](depth) if isinstance(blocks, str) else blocks
        with encoder_restored(model):
            try:
                handle = apply_encoder(model, blocks=chosen, **fields)
            except ValueError as error:
                raise NotApplicable(f"this model can't merge so: {error}") from None
            yield handle

    return Method({"mame": config}, on, True)


def rival(rule: Rule) -> Method:
    """A rival's rule."""
    config = {"name": type(rule).__name__, **vars(rule)}
    return Method({"rival": config}, partial(rival_on, rule=rule), True)


def smaller(side: float) -> Method:
    """The unmerged model on images of `side` x `side` pixels."""
    return Method({"side": int(side)}, partial(on_smaller_images, side=int(side)))


@dataclass(frozen=True)
class Knob:
    """A rival at any value of its knob.

    Attributes:
        label: for tables, {} for the value; `short` without it.
        make: gives the method at a value.
        most: of the knob; None: any number above 0.
        whole: the knob takes whole numbers alone.
        family: of its rows.
    """

    label: str
    short: str
    make: Callable[[float], Method]
    most: float | None = 1.0
    whole: bool = False
    family: Family = "rival"


RIVALS: dict[str, Knob] = {
    "default": Knob(
        "MaMe default, keep {}",
        "MaMe default",
        lambda keep: merged(None, keep=keep),
        family="mame",
    ),
    "tome": Knob("ToMe r {}", "ToMe", lambda r: rival(ToMe(r)), None, family="tome"),
    "tome-decreasing": Knob(
        "ToMe decreasing r {}", "ToMe, decreasing", lambda r: rival(ToMe(r, True)), None
    ),
    "evit": Knob("EViT keep {}", "EViT", lambda keep: rival(EViT(keep))),
    "random-all": Knob(
        "random in all blocks, keep {}",
        "random dropping in all blocks",
        lambda keep: rival(RandomDrop(keep)),
    ),
    "smaller": Knob("images of {} pixels", "smaller images", smaller, None, whole=True),
}


@torch.no_grad()
def at_flops(
    model: nn.Module, name: str, flops: float, call: Callable[[], Any], side: int
) -> tuple[float, float]:
    """The value of the knob of the rival `name` whose counted FLOPs are nearest to `flops`, and
    these.

    Args:
        model: what `call` calls.
        name: of RIVALS.
        flops: multiply-adds for one image.
        call: a forward of one image; how many tokens rivals leave depends on no image.
        side: of the images, in pixels.

    Raises:
        NotApplicable: it can do nothing with this model.
    """
    seen: dict[float, float] = {}

    def of(knob: float) -> float:
        if knob not in seen:
            with RIVALS[name].make(knob).counted(model) as handle:
                handle.reset()
                call()
                seen[knob] = handle.report().flops
        return seen[knob]

    low, high, knob_of = _range(model, name, call, side)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if of(knob_of(middle)) > flops:
            high = middle
        else:
            low = middle
    for end in (low, high):
        of(knob_of(end))
    knob = min(seen, key=lambda one: (abs(seen[one] - flops), one))
    return knob, seen[knob]


def _range(
    model: nn.Module, name: str, call: Callable[[], Any], side: int
) -> tuple[float, float, Callable[[float], float]]:
    """Two ends between which FLOPs grow, and the knob of what lies there."""
    if name.startswith("tome"):
        with counted(model) as handle:
            call()
            return -handle.report().blocks[0].tokens_in / 2, 0.0, lambda r: -r
    if name == "smaller":
        embed = embedding_of(find_encoder(model)[0])
        patch = 1 if embed is None else embed.kernel_size[-1]
        most = side // patch
        return 0.5, most + 0.5, lambda count: float(patch * max(1, min(most, round(count))))
    return 0.0, 1.0, lambda keep: max(keep, 1e-6)


def side_of(inputs: Mapping[str, Tensor]) -> int:
    """Side of the images in pixels, as the model sees them; 0 where they come as patches."""
    pixels = inputs["pixel_values"]
    return int(pixels.shape[-1]) if pixels.dim() in (4, 5) else 0
