"""Find a model's image among the keys of its attention.

The probe changes one slice of the latents and looks which keys move, while attention gives zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd import apply_mame, remove_mame
from tests.builders.transformers import TEXT
from tests.matrix.models.case import Case
from tests.matrix.models.watch import Merged, NoAttention, merging

AXES = "THW"


def check_probe(case: Case, model: nn.Module) -> None:
    """Check that a slice of each axis moves the keys that the family says, and a text none."""
    with _apart(model) as run:
        before, size = run(case.inputs())
        sides = dict(zip(AXES[-len(size) :], size, strict=True))
        for axis, side in sides.items():
            if side < 2:
                continue
            after, _ = run(_slice_changed(case, case.inputs(), axis, sides))
            every = torch.meshgrid(*(torch.arange(n) for n in size), indexing="ij")
            expected = (every[AXES[-len(size) :].index(axis)] == 1).flatten()
            for was, now in zip(before, after, strict=True):
                image, others = _split(was, now)
                assert torch.equal(image, expected), (
                    f"{axis}: keys {image.nonzero().flatten().tolist()[:9]} moved"
                )
                assert not others.any(), f"{axis}: keys of others moved"
        if case.text in case.inputs():
            after, _ = run(_text_changed(case.inputs(), case.text))
            for was, now in zip(before, after, strict=True):
                assert not _split(was, now)[0].any(), "the text moves keys of the image"


@contextmanager
def _apart(model: nn.Module) -> Iterator[Any]:
    """Give attention zeros; yield a function that returns the calls that merge, and the size."""
    handle = apply_mame(model, keep=0.5, min_tokens=1)

    def run(inputs: dict[str, Any]) -> tuple[list[Merged], tuple[int, ...]]:
        handle.reset()
        with torch.no_grad(), NoAttention(), merging() as found:
            model(**inputs)
        sizes = {layer.size for layer in handle.report().layers if layer.size}
        counts = [layer.tokens_in for layer in handle.report().layers if layer.merged]
        return found, sizes.pop() if sizes else (round(counts[0]),)

    try:
        yield run
    finally:
        remove_mame(model)


def _split(was: Merged, now: Merged) -> tuple[Tensor, Tensor]:
    """Which of the image's keys moved [n], and which of the others."""
    moved = (was.call["key"] - now.call["key"]).abs().amax((0, 1, 3)) > 1e-6
    last = was.first + was.tokens
    return moved[was.first : last], torch.cat([moved[: was.first], moved[last:]])


def _slice_changed(
    case: Case, inputs: dict[str, Any], axis: str, sides: dict[str, int]
) -> dict[str, Any]:
    """Return `inputs` with the second slice of tokens along `axis` changed."""
    name, dims = case.image.split()
    value = copy.deepcopy(inputs[name])
    listed = isinstance(value, list)
    for latent in value if listed else [value]:
        whole = latent[None] if listed and "B" in dims and latent.dim() < len(dims) else latent
        if "L" in dims:
            grid = torch.zeros(*sides.values(), dtype=torch.bool)
            grid.select(list(sides).index(axis), 1).fill_(True)
            at = grid.flatten().nonzero().flatten() + (TEXT if "7" in dims else 0)
            whole[:, at] += 1
            continue
        if "N" in dims:
            whole = whole[:, -1]
        dim = dims.replace("N", "").index(axis)
        step = whole.shape[dim] // sides[axis]
        whole.narrow(dim, step, step).add_(1)
    return {**inputs, name: value}


def _text_changed(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    """Return `inputs` with the third token of the text changed."""
    value = copy.deepcopy(inputs[name])
    for text in value:  # of each sample
        text[2] += 1
    return {**inputs, name: value}
