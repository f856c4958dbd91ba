"""Run rivals of merging in vision transformers through the library's own hooks and blocks.

So every rival gets the same models, calls and counting as our method, and differs only in what
happens to the tokens.

    with rival_on(model, ToMe(r=8)) as handle:
        logits = model(pixel_values).logits
        print(handle.report())
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd.core.paper import Plan, plan_tokens
from mame_sd.perception.encoder_registry import Encoder, find_encoder
from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.merged_block import MergedBlock
from mame_sd.perception.report import width_of
from mame_sd.runs.merging import NotApplicable

from .rules import BlockTokens, Rule

# name of the projection to keys: of that to queries
_QUERIES = {"k_proj": "q_proj", "key": "query", "qkv": "qkv"}


class RivalBlock(MergedBlock):
    """A merged block in which a rival's rule replaces merging."""

    def __init__(self, rule: Rule, *args: Any) -> None:
        super().__init__(*args)
        self.rule, places = rule, sorted(args[-1])
        self._place = places.index(self.number) if self.number in places else -1
        self._places = len(places)
        self._heard: dict[str, Tensor] = {}

    def _attend(self, normed: Tensor, sizes: Tensor | None, call: dict[str, Any]) -> Tensor:
        with ExitStack() as hooks:
            for what in self.rule.hears if self._place >= 0 else ():
                path = projection_of(self.spec, what)
                hook = self._module(path).register_forward_hook(partial(self._hear, what))
                hooks.callback(hook.remove)
            return super()._attend(normed, sizes if self.shared.prop_attn else None, call)

    def _hear(self, what: str, module: nn.Module, args: Any, output: Tensor) -> None:
        """Keep queries or keys [B, heads, L, d] that the attention's projection returned."""
        if self.spec.joined:
            width = width_of(self.block, self.spec)
            output = output[..., :width] if what == "queries" else output[..., width : 2 * width]
        self._heard[what] = output.unflatten(-1, (heads_of(self), -1)).transpose(1, 2)

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
        tokens = BlockTokens(
            x, prefix, self._place, sizes, keys, queries, self._places, self.shared.capturing
        )
        self._heard = {}
        reduced = self.rule(tokens)
        if self.shared.capturing and reduced.kept is not None:
            self.shared.keep(self.number, cast(Any, reduced))  # its `kept` is that of a plan
        if self.shared.now.counting:
            self.counts.count_call(x.shape[1], reduced.x.shape[1], reduced.cost)
        return reduced.x, reduced.sizes


class AblatedBlock(MergedBlock):
    """A block that merges by the paper's method with one part of it exchanged.

    Args:
        ablation: `feature` ("k" compares keys, "k-mean" keys averaged over heads), or keyword
            arguments of `plan_tokens`.
        args: those of `MergedBlock`.
    """

    def __init__(self, ablation: Mapping[str, Any], *args: Any) -> None:
        self.options = dict(ablation)
        self.compared = self.options.pop("feature", "x")
        super().__init__(*args)

    @property
    def compares_keys(self) -> bool:
        """Return True if similarity compares keys."""
        return bool(self.compared != "x")

    def _feature(self, x: Tensor, normed: Tensor) -> Tensor:
        keys = super()._feature(x, normed)
        if self.compared != "k-mean":
            return keys
        return keys.unflatten(-1, (heads_of(self), -1)).mean(-2)

    def _plan(self, feature: Tensor, size: tuple[int, int] | None) -> Plan:
        assert self.config is not None
        assert self.config.tau is not None
        return plan_tokens(feature, self.config.tau, self.shared.num_prefix_tokens, **self.options)


def ablated(
    model: nn.Module, blocks: Any, ablation: Mapping[str, Any], tau: float
) -> EncoderHandle:
    """Merge by an ablation of the paper's method.

    Args:
        model: a model that contains one registered vision transformer.
        blocks: as in `apply_encoder`.
        ablation: see `AblatedBlock`.
        tau: as in `apply_encoder`.

    Returns:
        The handle of the merging.

    Raises:
        ValueError: there is no registered vision transformer, or its keys would be compared
            and are unknown.
    """
    spec = find_encoder(model)[2]
    if "feature" in ablation and spec.keys is None:
        raise ValueError(f"expected a model whose keys are known, got one of kind {spec.name!r}")
    make = partial(AblatedBlock, ablation)
    handle = EncoderHandle(model, None, blocks, {"tau": tau}, None, None, make)
    handle.install()
    return handle


def heads_of(block: MergedBlock) -> int:
    """Return the number of heads of the block's attention."""
    owner: Any = block.block.get_submodule((block.spec.keys or "").rpartition(".")[0])
    return int(getattr(owner, "num_attention_heads", None) or owner.num_heads)


@contextmanager
def rival_on(model: nn.Module, rule: Rule) -> Iterator[EncoderHandle]:
    """Put a rival's rule into the blocks of a vision transformer for a `with` block.

    Merging that was on it is restored afterwards.

    Raises:
        ValueError: there is no registered vision transformer.
        NotApplicable: it lacks what the rule works by (a class token, keys).
    """
    encoder, blocks, spec = find_encoder(model)
    if "queries" in rule.hears and spec.prefix_tokens_of(encoder) == 0:
        raise NotApplicable(
            f"expected a class token to prune by, but {type(encoder).__name__} has none; choose"
            " another method"
        )
    for what in rule.hears:
        if projection_of(spec, what) not in dict(blocks[0].named_modules()):
            raise NotApplicable(
                f"expected attention with known {what}, but those of kind {spec.name!r} are not;"
                " choose another method"
            )
    chosen, make = rule.blocks(len(blocks)), partial(RivalBlock, rule)
    handle = EncoderHandle(model, None, chosen, {}, False, rule.prop_attn, make)
    handle.install()
    with handle:
        yield handle


def projection_of(spec: Encoder, what: str) -> str:
    """Return the path in a block of the projection to "keys" or "queries"; "" if it is unknown."""
    path, _, name = (spec.keys or "").rpartition(".")
    if what == "queries":
        name = _QUERIES.get(name, "")
    return f"{path}.{name}" if name else ""


@contextmanager
def on_smaller_images(model: nn.Module, side: int) -> Iterator[None]:
    """Show a vision transformer smaller images for a `with` block, with interpolated positions.

    Args:
        model: the model.
        side: side of the images in pixels.

    Raises:
        NotApplicable: positions can't be interpolated, images arrive cut into patches, or if
            `side` is not a multiple of the patch's.
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
    """Return the convolution that makes patches, or None."""
    kinds = (nn.Conv2d, nn.Conv3d)
    return next((part for part in encoder.modules() if isinstance(part, kinds)), None)
