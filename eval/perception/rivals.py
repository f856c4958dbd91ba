"""What merging has to beat in vision transformers, on the library's own path: its hooks and blocks,
with a rival's rule in them.

So every rival meets the same models, calls and counting as ours and differs in nothing but what
becomes of the tokens.

    with rival_on(model, ToMe(r=8)) as handle:
        logits = model(pixel_values).logits
        print(handle.report())
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd.perception.apply_encoder import encoder_restored
from mame_sd.perception.counts import width_of
from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.known_encoders import Encoder, find_encoder
from mame_sd.perception.merged_block import MergedBlock
from mame_sd.runs.methods import NotApplicable

from .rules import Given, Rule

# name of the projection to keys: of that to queries
_QUERIES = {"k_proj": "q_proj", "key": "query", "qkv": "qkv"}


class RivalBlock(MergedBlock):
    """A merged block in which a rival's rule takes the place of merging."""

    def __init__(self, rule: Rule, *args: Any) -> None:
        super().__init__(*args)
        self.rule, places = rule, sorted(args[-1])
        self._place = places.index(self.number) if self.number in places else -1
        self._places = len(places)
        self._heard: dict[str, Tensor] = {}

    def _attend(self, normed: Tensor, sizes: Tensor | None, call: dict[str, Any]) -> Tensor:
        with ExitStack() as hooks:
            for what in self.rule.hears if self._place >= 0 else ():
                path = projection_of(self.encoder, what)
                hook = self._module(path).register_forward_hook(partial(self._hear, what))
                hooks.callback(hook.remove)
            return super()._attend(normed, sizes if self.shared.prop_attn else None, call)

    def _hear(self, what: str, module: nn.Module, args: Any, output: Tensor) -> None:
        """Keeps queries or keys [B, heads, L, d] as the attention's projection gives them."""
        if self.encoder.joined:
            width = width_of(self.block, self.encoder)
            output = output[..., :width] if what == "queries" else output[..., width : 2 * width]
        self._heard[what] = output.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _merge(
        self,
        x: Tensor,
        normed: Tensor,
        sizes: Tensor | None,
        grid: tuple[int, int] | None,
        sized: bool,
    ) -> tuple[Tensor, Tensor | None]:
        assert self.counts is not None
        prefix = self.shared.num_prefix_tokens
        keys, queries = self._heard.get("keys"), self._heard.get("queries")
        told = self.shared.capturing
        given = Given(x, prefix, self._place, sizes, keys, queries, self._places, told)
        self._heard = {}
        reduced = self.rule(given)
        if self.shared.capturing and reduced.kept is not None:
            self.shared.keep(self.number, cast(Any, reduced))  # its `kept` is that of a plan
        if self.shared.now.counting:
            self.counts.add(x.shape[1], reduced.x.shape[1], reduced.cost)
        return reduced.x, reduced.sizes


@contextmanager
def rival_on(model: nn.Module, rule: Rule) -> Iterator[EncoderHandle]:
    """The vision transformer in `model` with a rival's rule in its blocks for a `with` block;
    merging that was on it is back after.

    Raises:
        ValueError: no vision transformer that is known.
        NotApplicable: it lacks what the rule works by (a class token, keys).
    """
    encoder, blocks, known = find_encoder(model)
    if "queries" in rule.hears and known.prefix_tokens_of(encoder) == 0:
        raise NotApplicable(
            f"expected a class token to prune by, but {type(encoder).__name__} has none; choose"
            " another method"
        )
    for what in rule.hears:
        if projection_of(known, what) not in dict(blocks[0].named_modules()):
            raise NotApplicable(
                f"expected attention with known {what}, but those of kind {known.name!r} are not;"
                " choose another method"
            )
    chosen, make = rule.blocks(len(blocks)), partial(RivalBlock, rule)
    with encoder_restored(model):
        handle = EncoderHandle(model, None, chosen, {}, False, rule.prop_attn, make)
        handle.install()
        yield handle


def projection_of(known: Encoder, what: str) -> str:
    """Path in a block of the projection that gives "keys" or "queries"; "" where it is not
    known.
    """
    path, _, name = (known.keys or "").rpartition(".")
    if what == "queries":
        name = _QUERIES.get(name, "")
    return f"{path}.{name}" if name else ""


@contextmanager
def on_smaller_images(model: nn.Module, side: int) -> Iterator[None]:
    """The vision transformer in `model` sees its images at `side` x `side` pixels for a `with`
    block, positions interpolated.

    Raises:
        NotApplicable: a model whose positions can't be interpolated or whose images come cut into
            patches, or a `side` that is no multiple of the patch's.
    """
    encoder = find_encoder(model)[0]
    embed = embedding_of(encoder)
    takes = "interpolate_pos_encoding" in inspect.signature(type(encoder).forward).parameters
    by_itself = type(encoder).__name__.startswith("Dinov2") or getattr(
        encoder, "dynamic_img_size", False
    )
    if not isinstance(embed, nn.Conv2d) or not (takes or by_itself):
        raise NotApplicable(
            f"expected a model whose positions can be interpolated, but {type(encoder).__name__}"
            " takes images of one size; choose another method"
        )
    patch = embed.kernel_size[-1]
    if side < patch or side % patch:
        raise NotApplicable(
            f"expected a multiple of the patch's {patch} pixels, got {side}; change it"
        )
    more = {"interpolate_pos_encoding": True} if takes else {}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pixels = kwargs.pop("pixel_values", None)
        pixels, args = (pixels, args) if pixels is not None else (args[0], args[1:])
        small = F.interpolate(pixels.float(), (side, side), mode="bicubic", antialias=True)
        return (small.to(pixels.dtype), *args), {**kwargs, **more}

    handle = encoder.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def embedding_of(encoder: nn.Module) -> Any:
    """The convolution that makes patches; None where there is none."""
    kinds = (nn.Conv2d, nn.Conv3d)
    return next((part for part in encoder.modules() if isinstance(part, kinds)), None)
