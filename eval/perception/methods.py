"""Apply a row of a classification benchmark to a model.

It does nothing, merges, applies a rival's rule, or shows smaller images. A method with a knob can
be brought to the FLOPs of another one: `at_flops` finds the value by counting.

Functions import what imports torch, so that an unknown row is refused before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mame_sd.perception.settings import FIRST, LEFT
from mame_sd.runs.merging import NotApplicable

if TYPE_CHECKING:
    from torch import nn

    from mame_sd.perception.handle import EncoderHandle

HALVINGS = 16  # of the knob's range


def _quarters(depth: int) -> tuple[int, ...]:
    from .rules import quarters

    return quarters(depth)


# names of sets of blocks: which they are, of so many
BLOCKS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "third": lambda depth: tuple(range(max(1, round(depth / 3)))),
    "first": lambda depth: tuple(range(max(1, round(depth * 2 / 3)))),  # the paper's first 8 of 12
    "all": lambda depth: tuple(range(depth)),
    "quarters": _quarters,
}


@dataclass(frozen=True)
class Method:
    """What a row does to a model; without arguments it leaves the model as it is.

    Attributes:
        config: everything that decides its answers, as JSON values.
        on: puts the method on a model for a `with` block, as it is timed, and gives the handle that
            counts tokens and FLOPs, or None.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    on: Callable[[nn.Module], AbstractContextManager[Any]] = lambda model: nullcontext()

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[EncoderHandle]:
        """Put the method on `model` for a `with` block, and yield a handle that counts its work."""
        from .rivals import rival_on
        from .rules import Rule

        with self.on(model) as handle:
            if handle is not None:
                yield handle
            else:
                with rival_on(model, Rule()) as handle:
                    yield handle


def merged(
    blocks: int | tuple[int, ...] | str | None,
    ablation: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Method:
    """Merge by arguments of `apply_encoder`.

    Args:
        blocks: as in `apply_encoder`, or a name of `BLOCKS`.
        ablation: arguments of `AblatedBlock` for an ablation of the paper's method, or None.
        fields: further arguments of `apply_encoder`.
    """
    config = {**fields, **({"ablation": ablation} if ablation else {}), "blocks": blocks}
    if "tau" not in fields:
        first = {"first": FIRST} if blocks is None else {}
        config["defaults"] = {"left": LEFT, "schedule": "decreasing", **first}

    @contextmanager
    def on(model: nn.Module) -> Iterator[EncoderHandle]:
        from mame_sd.perception.apply_encoder import apply_encoder
        from mame_sd.perception.encoder_registry import find_encoder

        from .rivals import ablated

        depth = len(find_encoder(model)[1])
        chosen = BLOCKS[blocks](depth) if isinstance(blocks, str) else blocks
        try:
            if ablation is None:
                handle = apply_encoder(model, blocks=chosen, **fields)
            else:
                handle = ablated(model, chosen, ablation, **fields)
        except ValueError as error:
            raise NotApplicable(f"this model can't merge like this: {error}") from None
        with handle:
            yield handle

    return Method({"mame": config}, on)


def rival(name: str, *values: float) -> Method:
    """Reduce tokens by the rule of that name in `rules`, made of `values`."""
    from . import rules
    from .rivals import rival_on

    rule = getattr(rules, name)(*values)
    return Method({"rival": {"name": name, **vars(rule)}}, partial(rival_on, rule=rule))


def smaller(side: float) -> Method:
    """Show the unmerged model images of `side` x `side` pixels."""
    from .rivals import on_smaller_images

    return Method({"side": int(side)}, partial(on_smaller_images, side=int(side)))


def _share(part: float, tokens: float, patches: int, patch: int) -> float:
    return max(part, 1e-6)


def _fewer(part: float, tokens: float, patches: int, patch: int) -> float:
    return (1 - part) * tokens / 2


def _side(part: float, tokens: float, patches: int, patch: int) -> float:
    return float(patch * max(1, min(patches, round(0.5 + part * patches))))


@dataclass(frozen=True)
class Knob:
    """A rival at any value of its knob.

    Attributes:
        label: label for tables, with {} for the value.
        short: label without the value.
        make: returns the method at a value.
        at: returns the value at a part of the knob's range in [0, 1], in which FLOPs grow. It also
            gets the model's tokens, patches along a side and their side in pixels.
        most: largest value. If None, any number above 0.
        whole: True if the knob takes whole numbers only.
    """

    label: str
    short: str
    make: Callable[[float], Method]
    at: Callable[[float, float, int, int], float] = _share
    most: float | None = 1.0
    whole: bool = False


RIVALS: dict[str, Knob] = {
    "default": Knob("MaMe default, keep {}", "MaMe default", lambda keep: merged(None, keep=keep)),
    "tome": Knob("ToMe r {}", "ToMe", lambda r: rival("ToMe", r), _fewer, None),
    "tome-decreasing": Knob(
        "ToMe decreasing r {}", "ToMe, decreasing", lambda r: rival("ToMe", r, True), _fewer, None
    ),
    "evit": Knob("EViT keep {}", "EViT", lambda keep: rival("EViT", keep)),
    "random-all": Knob(
        "random in all blocks, keep {}",
        "random dropping in all blocks",
        lambda keep: rival("RandomDrop", keep),
    ),
    "smaller": Knob("images of {} pixels", "smaller images", smaller, _side, None, whole=True),
}


def at_flops(
    model: nn.Module, name: str, flops: float, call: Callable[[], Any], side: int
) -> tuple[float, float]:
    """Find the value of a rival's knob whose counted FLOPs are nearest to `flops`.

    Args:
        model: the model that `call` calls.
        name: name of the rival in RIVALS.
        flops: multiply-adds for one image.
        call: runs a forward of one image; the number of tokens that rivals leave depends on no
            image.
        side: side of the images in pixels.

    Returns:
        The value and its FLOPs.

    Raises:
        NotApplicable: the rival can do nothing with this model.
    """
    import torch

    from mame_sd.perception.encoder_registry import find_encoder

    from .rivals import embedding_of, rival_on
    from .rules import Rule

    knob = RIVALS[name]
    seen: dict[float, float] = {}
    embed = embedding_of(find_encoder(model)[0])
    patch = 1 if embed is None else embed.kernel_size[-1]
    with torch.no_grad(), rival_on(model, Rule()) as handle:
        call()
        tokens = handle.report().layers[0].tokens_in

    def of(part: float) -> float:
        value = knob.at(part, tokens, side // patch, patch)
        if value not in seen:
            with torch.no_grad(), knob.make(value).counting(model) as handle:
                handle.reset()
                call()
                seen[value] = handle.report().flops
        return seen[value]

    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if of(middle) > flops:
            high = middle
        else:
            low = middle
    for end in (low, high):
        of(end)
    value = min(seen, key=lambda one: (abs(seen[one] - flops), one))
    return value, seen[value]
