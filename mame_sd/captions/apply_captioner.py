"""apply_captioner: merging behind the vision tower of LLaVA or Qwen-VL, so that its language model
reads fewer tokens, until `remove_captioner`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from mame_sd.captions.handle import CaptionHandle
from mame_sd.captions.known_captioners import (
    KNOWN,
    PARTS,
    QWEN,
    REFUSED,
    layer_of,
    name_of,
    reader_in,
)
from mame_sd.captions.on_model import block, take
from mame_sd.config import MaMeConfig
from mame_sd.perception.apply_encoder import remove_encoder
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.upstream import require_captioner


def apply_captioner(
    target: nn.Module,
    config: MaMeConfig | None = None,
    **fields: Any,
) -> CaptionHandle:
    """Merges the visual tokens of a LLaVA or Qwen-VL, until `remove_captioner`.

    Those that are farthest from one another stay, and the others join the nearest of them
    (`mame_sd.captions.farthest`). The tower runs whole. Prompts are given as the processor writes
    them, with an image token for each patch; those that stay keep their order and positions.

    Args:
        target: a model that holds one LLaVA, LLaVA-NeXT, Qwen2-VL or Qwen2.5-VL.
        config: the settings, of which `keep` may be given.
        fields: `keep`, the share of the visual tokens that the language model gets, .25 by default.

    Raises:
        TypeError: `config` is no MaMeConfig.
        RuntimeError: the installed transformers lacks a name that merging needs.
        ValueError: no such model, a refused one, more than one, or bad settings.
    """
    found = [(module, name) for module in target.modules() if (name := name_of(module))]
    refused = next((name for _, name in found if name in REFUSED), None)
    unknown = None if found else reader_in(target)
    known = f"expected one of {', '.join(KNOWN)}, got"
    if refused is not None:
        raise ValueError(f"{known} {refused}: {REFUSED[refused]}; leave it as it is")
    if unknown is not None:
        raise ValueError(
            f"{known} {type(unknown).__name__}, which reads images for a language model in a way"
            " that is not known here; leave it as it is"
        )
    if len(found) != 1:
        raise ValueError(f"{known} {len(found)} of them in {type(target).__name__}; give one")
    ((model, name),) = found
    require_captioner(model, PARTS[name])
    if name not in QWEN:
        layer_of(model)
        find_encoder(model.get_submodule("model.vision_tower"))
    handle = CaptionHandle(model, config, fields)
    handle.install()
    return handle


def remove_captioner(target: nn.Module) -> None:
    """Takes merging off every captioner in `target`. Does nothing if there is none."""
    for module in target.modules():
        take(module)
    remove_encoder(target)


@contextmanager
def captioner_restored(target: nn.Module) -> Iterator[None]:
    """Take off after the block what it applied to `target`, which merges for this thread alone."""
    with ExitStack() as blocks:
        for module in target.modules():
            if name_of(module) in KNOWN:
                blocks.enter_context(block(module))
        yield
