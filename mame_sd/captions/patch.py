"""Replace `forward` and `generate` of a captioner.

What a call needs to know is stored with the call and its cache, so that the later words of an
answer fit its prompt whatever other threads do meanwhile.
"""

from __future__ import annotations

import inspect
import threading
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from mame_sd.attach import check_free, give_back, place_of, replacement_of
from mame_sd.captions.prompts import Image, images_by_prompt
from mame_sd.captions.shorten import (
    PromptShortener,
    after_images,
    check_empty,
    check_generate,
    has_images,
    tower_turn,
)
from mame_sd.compat import cache_in
from mame_sd.forks import free_in_children

_NAMES = ("forward", "generate")
_CHANGES = free_in_children(threading.RLock())  # held while the patch of a model changes


# The running `generate`: its model, what merges, and the images of each of its prompts.
_GENERATING: ContextVar[tuple[ModelPatch, PromptShortener, list[list[Image]]] | None]
_GENERATING = ContextVar("generating", default=None)


class ModelPatch:
    """The replaced methods of one captioner, and the merging that they use.

    Attributes:
        shortener: what merges. If None, nothing does.
    """

    shortener: PromptShortener | None = None

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self._generating = 0  # running calls of `generate`, which need the replaced forward

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generating": 0}

    def leave(self) -> None:
        """Take the replaced methods off the model if nothing needs them any more."""
        with _CHANGES:
            if self.shortener is None and not self._generating:
                for name in _NAMES:
                    if _is_ours(replacement_of(self.model, name)):
                        give_back(self.model, name)

    def forward(self, call: dict[str, Any]) -> Any:
        """Run a call of the model, with fewer tokens if it has images."""
        original = partial(type(self.model).forward, self.model)
        if not has_images(call):
            generating = _GENERATING.get()
            if generating is None or generating[0] is not self or not self._is_prompt(call):
                return original(**after_images(call))
            _, shortener, rows = generating
            times = len(call["input_ids"]) // len(rows)  # beams
            return shortener.forward(original, call, [one for row in rows for one in row * times])
        merging = self._shortener_for(call)
        if merging is not None:
            return merging.forward(original, call)
        with tower_turn():
            return original(**call)

    def generate(self, call: dict[str, Any]) -> Any:
        """Write after prompts whose images pass through the tower first."""
        original = partial(type(self.model).generate, self.model)
        shortener = self._shortener_for(call)
        if shortener is None:
            return original(**call)
        check_generate(self.model, call)
        if call.get("inputs") is not None:
            call["input_ids"] = call.pop("inputs")
        with torch.no_grad():
            seen = shortener.images({k: value for k, value in call.items() if value is not None})
        del call["pixel_values"]
        token = int(self.model.config.image_token_id)
        rows = images_by_prompt(call["input_ids"], token, seen)
        with _CHANGES:
            self._generating += 1
        turn = _GENERATING.set((self, shortener, rows))
        try:
            return original(**call)
        finally:
            _GENERATING.reset(turn)
            with _CHANGES:
                self._generating -= 1
                self.leave()

    def _is_prompt(self, call: dict[str, Any]) -> bool:
        """Return True if a call reads prompts with image tokens, not a word just written."""
        ids = call.get("input_ids")
        if ids is None or ids.shape[1] == 1:
            return False
        return bool((ids == self.model.config.image_token_id).any())

    def _shortener_for(self, call: dict[str, Any]) -> PromptShortener | None:
        """Return what merges a call's images; None if it has none or nothing merges.

        Raises:
            ValueError: nothing merges, but the call's cache holds merged prompts.
        """
        shortener = self.shortener if has_images(call) else None
        if shortener is not None and shortener.active:
            return shortener
        check_empty(cache_in(call), merged=True)
        return None


class PatchedMethod:
    """Replace one method of a model, with the same signature."""

    def __init__(self, patch: ModelPatch, name: str) -> None:
        self.patch, self.name = patch, name

    @property
    def __signature__(self) -> inspect.Signature:
        kind: Any = type(self.patch.model)
        return _signature(kind, self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the patch's method of the same name with all arguments by name."""
        names = [name for name in self.__signature__.parameters if name != "kwargs"]
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        return getattr(self.patch, self.name)(call)


@lru_cache
def _signature(kind: Any, name: str) -> inspect.Signature:
    """Return the signature of a method without its first parameter."""
    original = inspect.signature(getattr(kind, name))
    return original.replace(parameters=[*original.parameters.values()][1:], return_annotation=Any)


def patch_on(module: nn.Module, name: str = "forward") -> ModelPatch | None:
    """Return the patch on `module`, found by one of the methods that it replaces; None if none."""
    there = replacement_of(module, name)
    return there.patch if isinstance(there, PatchedMethod) else None


def _is_ours(method: Any) -> bool:
    return isinstance(method, PatchedMethod)


def attach(shortener: PromptShortener) -> None:
    """Use `shortener` from now on.

    Raises:
        ValueError: another tool has replaced `forward` or `generate`.
    """
    with _CHANGES:
        _placed(shortener.model).shortener = shortener


def detach(module: nn.Module, shortener: PromptShortener | None = None) -> None:
    """Stop using `shortener` in a model. If None, stop whatever merges."""
    patch = patch_on(module) or patch_on(module, "generate")  # a tool may have wrapped forward
    if patch is None:
        return
    with _CHANGES:
        if shortener in (None, patch.shortener):
            patch.shortener = None
        patch.leave()


def _placed(model: nn.Module) -> ModelPatch:
    """Return the patch on `model`, and put it there if there is none."""
    patch = patch_on(model)
    if patch is None:
        patch = ModelPatch(model)
        for name in _NAMES:
            check_free(model, name, _is_ours)
        for name in _NAMES:
            setattr(*place_of(model, name), PatchedMethod(patch, name))
    return patch
