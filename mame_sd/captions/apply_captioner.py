"""apply_captioner: merging behind the vision tower of LLaVA or Qwen-VL, so that its language model
reads fewer tokens.

    handle = apply_captioner(llava)               # a quarter of the visual tokens stays
    handle = apply_captioner(llava, keep=0.5)     # this share of them
    handle = apply_captioner(llava, tau=0.8)      # by similarity: each image keeps its own number
    ids = llava.generate(**processor(images=images, text=prompts, return_tensors="pt"))
    handle = apply_captioner(llava, blocks=8)     # in the first blocks of the tower instead
    print(handle.report())                        # visual tokens
    remove_captioner(llava)                       # bit-equal to before

Prompts are given as the processor writes them, with an image token for each patch. `forward` and
`generate` take out the image tokens whose patches have merged into others, with labels and masks.
`generate` gives back whole prompts before what it wrote, and shows them to stopping criteria,
logits processors and streamers. Tokens that stay keep their order and their positions, so that text
is as far from them as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from mame_sd.captions.handle import CaptionHandle, MergeAfterTower, MergeInTower
from mame_sd.captions.on_model import block, clear
from mame_sd.captions.towers import KNOWN, PARTS, REFUSED, name_of, reader_in
from mame_sd.config import MaMeConfig
from mame_sd.perception.apply_encoder import remove_encoder
from mame_sd.upstream import require_captioner


def apply_captioner(
    target: nn.Module,
    config: MaMeConfig | None = None,
    *,
    blocks: int | Iterable[int] | None = None,
    prop_attn: bool | None = None,
    schedule: str | None = None,
    **fields: Any,
) -> CaptionHandle:
    """Merges the visual tokens of a LLaVA, until `remove_captioner`.

    By default those that are farthest from one another stay, and the others join the nearest of
    them (`mame_sd.captions.farthest`). The tower runs whole. With `blocks` tokens merge in
    the tower's blocks, as in a vision transformer.

    Args:
        target: a model that holds one LLaVA, LLaVA-NeXT, Qwen2-VL or Qwen2.5-VL.
        config: the settings; of its fields only those that were given count.
        blocks: as `apply_encoder` takes it, of the blocks before the layer that is read. None:
            behind the tower, as Qwen-VL's always do.
        prop_attn: as `apply_encoder` takes it, with `blocks`.
        schedule: as `apply_encoder` takes it, with `blocks`.
        fields: fields of MaMeConfig over those of `config`: `keep` or `tau`, with `blocks` all that
            an encoder takes. One `keep` is the share of the visual tokens that the language model
            gets, .25 by default. In blocks it is near it: their shares are whole tokens. By `tau`
            each image keeps its own number.

    Raises:
        TypeError: `config` is no MaMeConfig.
        RuntimeError: the installed transformers lacks a name that merging needs.
        ValueError: no such model, a refused one, more than one, or bad settings.
    """
    found = [(module, name) for module in target.modules() if (name := name_of(module))]
    for _, name in found:
        if name in REFUSED:
            raise ValueError(
                f"expected a model whose language model can read fewer tokens, got {name}:"
                f" {REFUSED[name]}; known are {', '.join(KNOWN)}"
            )
    unknown = None if found else reader_in(target)
    if unknown is not None:
        raise ValueError(
            f"expected one of {', '.join(KNOWN)}, got {type(unknown).__name__}, which reads images"
            " for a language model in a way that is not known here; leave it as it is"
        )
    if len(found) != 1:
        raise ValueError(
            f"expected one of {', '.join(KNOWN)}, got {len(found)} of them in"
            f" {type(target).__name__}; give one"
        )
    ((model, name),) = found
    require_captioner(model, PARTS[name])
    images: MergeInTower | MergeAfterTower
    if blocks is None:
        images = MergeAfterTower(model, config, prop_attn, schedule, fields)
    else:
        images = MergeInTower(model, config, blocks, prop_attn, schedule, fields)
    handle = CaptionHandle(model, images)
    handle.install()
    return handle


def remove_captioner(target: nn.Module) -> None:
    """Takes merging off every LLaVA in `target`. Does nothing if there is none."""
    for module in target.modules():
        clear(module)
    remove_encoder(target)


@contextmanager
def captioner_restored(target: nn.Module) -> Iterator[None]:
    """What is applied to `target` in the block goes with it, and merges for this thread alone."""
    with ExitStack() as blocks:
        for module in target.modules():
            if name_of(module) in KNOWN:
                blocks.enter_context(block(module))
        yield
