"""Apply merging after the vision tower of LLaVA or Qwen-VL, and remove it."""

from __future__ import annotations

from typing import Any

from torch import nn

from mame_sd.captions.captioner_registry import (
    KNOWN,
    PARTS,
    QWEN,
    layer_of,
    name_of,
    reader_in,
)
from mame_sd.captions.handle import CaptionHandle
from mame_sd.captions.patch import detach
from mame_sd.compat import require_captioner
from mame_sd.config import MaMeConfig
from mame_sd.perception.apply_encoder import remove_encoder
from mame_sd.perception.encoder_registry import find_encoder
from mame_sd.refused import CAPTIONERS


def apply_captioner(
    target: nn.Module,
    config: MaMeConfig | None = None,
    **fields: Any,
) -> CaptionHandle:
    """Merge the visual tokens that the language model of a LLaVA or Qwen-VL reads.

    The tokens that are farthest from one another stay, and each other one joins the nearest of them
    (`mame_sd.captions.farthest`). The vision tower itself computes all tokens. Prompts are passed
    as the processor writes them, with an image token for each patch; the remaining tokens keep
    their order and positions. `remove_captioner` ends it.

    Args:
        target: a model that contains one LLaVA, Qwen2-VL or Qwen2.5-VL.
        config: settings, of which only `keep` may be set.
        fields: `keep`, the share of the visual tokens that the language model reads, .25 by
            default.

    Returns:
        The handle that changes, reports and removes this merging.

    Raises:
        TypeError: `config` is not a MaMeConfig.
        RuntimeError: the installed transformers lacks a name that merging needs.
        ValueError: there is no such model, a refused one or more than one, or a setting is
            invalid.
    """
    captioners = [(module, name) for module in target.modules() if (name := name_of(module))]
    refused = next((name for _, name in captioners if name in CAPTIONERS), None)
    unknown = None if captioners else reader_in(target)
    expected = f"expected one of {', '.join(KNOWN)}, got"
    if refused is not None:
        raise ValueError(f"{expected} {refused}: {CAPTIONERS[refused]}; leave it as it is")
    if unknown is not None:
        raise ValueError(
            f"{expected} {type(unknown).__name__}, which reads images for a language model in a way"
            " that is not known here; leave it as it is"
        )
    if len(captioners) != 1:
        raise ValueError(
            f"{expected} {len(captioners)} of them in {type(target).__name__}; give one"
        )
    ((model, name),) = captioners
    require_captioner(model, PARTS[name])
    if name not in QWEN:
        layer_of(model)
        find_encoder(model.get_submodule("model.vision_tower"))
    handle = CaptionHandle(model, config, fields)
    handle.install()
    return handle


def remove_captioner(target: nn.Module) -> None:
    """Remove merging from every captioner in `target`, if there is any."""
    for module in target.modules():
        detach(module)
    remove_encoder(target)
