"""Replacements for `forward` and `generate` of a LLaVA: they call the model's own with fewer image
tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.captions.prompts import Image, Kept, kept_of

_NAMES = ("forward", "generate")
_INSTEAD = {
    "inputs_embeds": "give input_ids, whose image tokens say where the images stand",
    "mm_encoder_outputs": "give pixel_values, which the tower merges itself",
}


@dataclass
class VisualCounts:
    """Sums over images since the last reset.

    Attributes:
        images: how many.
        unmerged: image tokens of their prompts as the processor wrote them.
        kept: image tokens that the language model read.
    """

    images: int = 0
    unmerged: int = 0
    kept: int = 0

    def add(self, images: list[Image]) -> None:
        self.images += len(images)
        self.unmerged += sum(image.unmerged for image in images)
        self.kept += sum(len(image.places) for image in images)


class Calls:
    """Both calls of one model.

    Args:
        model: a LLaVA of a known class.
        seen: what the images of a call give, which has `pixel_values`.

    Attributes:
        active: False leaves every call as it is.
    """

    def __init__(self, model: nn.Module, seen: Callable[[dict[str, Any]], list[Image]]) -> None:
        self.model, self.seen, self.active = model, seen, True
        self.counts = VisualCounts()
        self._own = {name: Call(self, name) for name in _NAMES}

    def put(self) -> None:
        """Puts them on the model.

        Raises:
            ValueError: another tool has replaced one of them.
        """
        for name in _NAMES:
            there = self.model.__dict__.get(name)
            if there is not None and not isinstance(there, Call):
                raise ValueError(
                    f"expected a {type(self.model).__name__} with its own {name}, found another"
                    f" tool's in its place ({there!r}); apply merging before that tool"
                )
        self.model.__dict__.update(self._own)

    def take(self) -> None:
        """Takes them off the model."""
        for name in _NAMES:
            self.model.__dict__.pop(name, None)

    def run(self, name: str, call: dict[str, Any]) -> Any:
        """The model's own call of this name, with fewer tokens where it is given images."""
        own = getattr(type(self.model), name)
        if name == "forward":
            fewer = self._fewer(call)
            return own(self.model, **(call if fewer is None else fewer[0]))
        if call.get("inputs") is not None:
            call["input_ids"] = call.pop("inputs")
        with torch.no_grad():
            fewer = self._fewer(call)
            if fewer is None:
                return own(self.model, **call)
            ids = call["input_ids"]
            call, short = fewer
            for length in ("max_length", "min_length"):
                if call.get(length) is not None:
                    call[length] -= ids.shape[1] - short.shape[1]
            written = own(self.model, **call, input_ids=short)
        if isinstance(written, Tensor):
            return _with_dropped(written, ids, short)
        written.sequences = _with_dropped(written.sequences, ids, short)
        return written

    def _fewer(self, call: dict[str, Any]) -> tuple[dict[str, Any], Tensor] | None:
        """The call with vectors for tokens, fewer of them, and the ids of these [B, L']. None: it
        has no images, or is left as it is.
        """
        call = {name: value for name, value in call.items() if value is not None}
        if not len(call.get("pixel_values", ())):
            return None
        if not self.active:
            return None
        self._check(call)
        images = self.seen(call)
        model: Any = self.model
        ids, mask = call.pop("input_ids"), call.get("attention_mask")
        token = int(model.config.image_token_id)
        kept = kept_of(ids, mask, token, images)
        self.counts.add(images)
        if any(len(image.places) < image.unmerged for image in images):
            ids = kept.of(ids, self._padding())
            call.update(_tokens_of(call, kept))
        embeds = model.get_input_embeddings()(ids)
        seen = torch.cat([image.features for image in images]).to(embeds)
        call["inputs_embeds"] = embeds.masked_scatter((ids == token).unsqueeze(-1), seen)
        for name in ("pixel_values", "image_sizes"):
            call.pop(name, None)
        return call, ids

    def _padding(self) -> int:
        """The id that padding is written with; its vectors are masked."""
        config: Any = getattr(self.model, "generation_config", None)
        token = getattr(config, "pad_token_id", None)
        return 0 if token is None else int(token)

    def _check(self, call: dict[str, Any]) -> None:
        """Raises ValueError for what can't go together with images whose patches merge."""
        for name, instead in _INSTEAD.items():
            if name in call:
                raise ValueError(f"{name}: expected none beside merged images, got it; {instead}")
        for name in ("vision_feature_layer", "vision_feature_select_strategy"):
            own = getattr(self.model.config, name)
            if call.pop(name, own) != own:
                raise ValueError(
                    f"{name}: expected that of the model's config ({own!r}) for merged images, got"
                    " another; set it there, before apply_mame"
                )
        cache = call.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise ValueError(
                "past_key_values: expected an empty cache beside images whose patches merge, got"
                f" {cache.get_seq_length()} tokens; give the whole conversation at once"
            )
        mask = call.get("attention_mask")
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                "attention_mask: expected [B, L] beside images whose patches merge, got"
                f" {list(mask.shape)}; give the processor's"
            )


class Call:
    """Replaces one method of a model, with the same signature."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.calls, self.name = calls, name
        signature = inspect.signature(getattr(type(calls.model), name))
        self.__signature__ = signature.replace(
            parameters=list(signature.parameters.values())[1:], return_annotation=Any
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = [name for name in self.__signature__.parameters if name != "kwargs"]
        return self.calls.run(self.name, {**dict(zip(names, args, strict=False)), **kwargs})


def calls_on(module: nn.Module) -> list[Calls]:
    """What stands on `module`."""
    there = module.__dict__.get("forward")
    return [there.calls] if isinstance(there, Call) else []


def _tokens_of(call: dict[str, Any], kept: Kept) -> dict[str, Any]:
    """What a call holds for each token, of those that stay."""
    found: dict[str, Any] = {}
    if "attention_mask" in call or not bool(kept.real.all()):
        dtype = call["attention_mask"].dtype if "attention_mask" in call else torch.long
        found["attention_mask"] = kept.real.to(dtype)
    for name, padding in (("labels", -100), ("position_ids", 0)):
        if name in call:
            found[name] = kept.of(call[name], padding)
    return found


def _with_dropped(written: Tensor, ids: Tensor, short: Tensor) -> Tensor:
    """Tokens [n B, L' + T] that begin with prompts `short` [B, L'], with prompts ids [B, L]."""
    prompts = ids.repeat_interleave(len(written) // len(ids), 0)
    return torch.cat([prompts, written[:, short.shape[1] :]], 1)
