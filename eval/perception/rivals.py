"""What merging has to beat in vision transformers, on the library's own path: its hooks and blocks,
with a rival's rule in them.

So every rival meets the same models, calls and counting as ours and differs in nothing but what
becomes of the tokens.

    with rival_on(model, ToMe(r=8)) as handle:
        logits = model(pixel_values).logits
        print(handle.report())
    with on_smaller_images(model, 160):
        logits = model(pixel_values).logits      # the same pixel_values, made smaller inside
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd.perception.apply_encoder import encoder_restored
from mame_sd.perception.blocks import MergedBlock
from mame_sd.perception.counts import width_of
from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.known_encoders import Encoder, find_encoder
from mame_sd.runs.methods import NotApplicable

from .rules import Given, Rule, Unchanged

_QUERIES = {
    "k_proj": "q_proj",
    "key": "query",
    "qkv": "qkv",
}  # name of the projection to keys: of that to queries


class RivalBlock(MergedBlock):
    """A merged block in which a rival's rule takes the place of merging.

    Args:
        coords: what the blocks of a model share: where the patches lie that are left,
            [B, patches, 2], of rules that only drop some.
    """

    def __init__(self, rule: Rule, coords: dict[str, Tensor | None], *args: Any) -> None:
        super().__init__(*args)
        self.rule, self.coords = rule, coords
        self._place = sorted(args[-1]).index(self.number) if self.number in args[-1] else -1
        self._places = len(args[-1])
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
        keys, queries = (self._heard.get(what) for what in ("keys", "queries"))
        given = Given(x, self.shared.num_prefix_tokens, self._place, sizes, keys, queries)
        given.places = self._places
        self._heard = {}
        if self.shared.capture and grid is not None:
            given.coords = self._all_coords(grid, x) if self._place == 0 else self.coords["left"]
        reduced = self.rule(given)
        self.coords["left"] = given.coords
        if self.shared.capture and reduced.x.shape[1] < x.shape[1]:
            if reduced.rows is None:
                raise NotApplicable(
                    "expected tokens that can be traced to patches, got a rule that tells nothing"
                    " of them"
                )
            self.shared.keep(self.number, cast(Any, Traced(reduced.rows)))
        if self.shared.now.counting:
            self.counts.add(x.shape[1], reduced.x.shape[1], reduced.cost)
        return reduced.x, reduced.sizes

    def _all_coords(self, grid: tuple[int, int], x: Tensor) -> Tensor:
        """Rows and columns of the patches [B, patches, 2]."""
        every = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).to(x.device)
        return every.expand(len(x), -1, -1)


@dataclass(frozen=True)
class Traced:
    """Puts tokens [B, L', C] back at [B, L, C]: each takes its row."""

    rows: Tensor

    def restore(self, y: Tensor) -> Tensor:
        """All tokens."""
        return y.gather(1, self.rows.unsqueeze(-1).expand(-1, -1, y.shape[-1]))


def grown(y: Tensor, prefix: int, grid: tuple[int, int]) -> Tensor:
    """Tokens [B, prefix + h' w', C] of a square grid at the patches of `grid`, by bilinear
    interpolation.
    """
    body = y[:, prefix:]
    image = body.transpose(1, 2).unflatten(2, (math.isqrt(body.shape[1]), -1))
    body = F.interpolate(image, grid, mode="bilinear").flatten(2).transpose(1, 2)
    return torch.cat([y[:, :prefix], body], 1)


@contextmanager
def rival_on(
    model: nn.Module, rule: Rule, blocks_of: Callable[[int], tuple[int, ...]] | None = None
) -> Iterator[EncoderHandle]:
    """The vision transformer in `model` with a rival's rule in its blocks for a `with` block;
    merging that was on it is back after.

    Args:
        model: with a vision transformer in it.
        rule: the rival's.
        blocks_of: which blocks of so many reduce the tokens; None: those of the rule as it was
            published.

    Raises:
        ValueError: no vision transformer that is known.
        NotApplicable: it lacks what the rule works by (a class token, a grid, keys).
    """
    encoder, blocks, known = find_encoder(model)
    if rule.class_token and known.prefix_tokens_of(encoder) == 0:
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
    with encoder_restored(model):
        handle = EncoderHandle(
            model,
            None,
            (blocks_of or rule.blocks)(len(blocks)),
            {},
            False,
            rule.prop_attn,
            partial(RivalBlock, rule, {"left": None}),
        )
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
def counted(model: nn.Module) -> Iterator[EncoderHandle]:
    """`model` as it is, its tokens and FLOPs counted; not for timing."""
    with rival_on(model, Unchanged()) as handle:
        yield handle


@contextmanager
def on_smaller_images(model: nn.Module, side: int | tuple[int, int]) -> Iterator[None]:
    """The vision transformer in `model` sees its images, or a clip's frames, at `side` x `side` or
    (h, w) pixels for a `with` block.

    Positions are interpolated; those of VideoMAE, which are no picture, are those of the nearest
    patches.

    Raises:
        NotApplicable: a model whose positions can't be interpolated or whose images come cut into
            patches, or a `side` that is no multiple of the patch's.
    """
    encoder = find_encoder(model)[0]
    embed = embedding_of(encoder)
    named = "interpolate_pos_encoding" in inspect.signature(type(encoder).forward).parameters
    takes = named and isinstance(embed, nn.Conv2d)  # ViViT's own can't do it
    by_itself = type(encoder).__name__.startswith("Dinov2") or getattr(
        encoder, "dynamic_img_size", False
    )
    if embed is None or not (takes or by_itself or _places(encoder)):
        raise NotApplicable(
            f"expected a model whose positions can be interpolated, but {type(encoder).__name__}"
            " takes images of one size; choose another method"
        )
    patch = embed.kernel_size[-1]
    size = (side, side) if isinstance(side, int) else side
    if min(size) < patch or any(one % patch for one in size):
        raise NotApplicable(
            f"expected images whose side is a multiple of the patch's {patch} pixels, got {side};"
            " change it"
        )

    def shrink(pixels: Tensor) -> Tensor:
        flat = pixels.float().flatten(0, -4)
        small = F.interpolate(flat, size, mode="bicubic", antialias=True)
        return small.view(*pixels.shape[:-2], *size).to(pixels.dtype)

    more = {"interpolate_pos_encoding": True} if takes else {}
    with _sees(encoder, shrink, more), _at_places(encoder, size=size):
        yield


@contextmanager
def on_fewer_frames(model: nn.Module, frames: int) -> Iterator[None]:
    """The video transformer in `model` sees so many frames of each clip, for a `with` block. They
    are whole tubelets, evenly spaced and each at its own time.

    Raises:
        NotApplicable: a model that sees images or whose positions are not known, or a number that
            is no multiple of a tubelet's frames.
    """
    encoder = find_encoder(model)[0]
    embed, places = embedding_of(encoder), _places(encoder)
    if places is None or embed is None:
        raise NotApplicable(
            "expected a VideoMAE, whose tubelets can be left out, got"
            f" {type(encoder).__name__}; choose another method"
        )
    tubelet = embed.kernel_size[0]
    if frames % tubelet or not tubelet <= frames <= places[0] * tubelet:
        raise NotApplicable(
            f"expected a multiple of a tubelet's {tubelet} frames, up to {places[0] * tubelet}, got"
            f" {frames}; change it"
        )
    kept = [int(n) for n in torch.linspace(0, places[0] - 1, frames // tubelet).round()]
    if frames == tubelet:
        kept = [places[0] // 2]

    def choose(clips: Tensor) -> Tensor:
        return clips.unflatten(1, (-1, tubelet))[:, kept].flatten(1, 2)

    with _sees(encoder, choose, {}), _at_places(encoder, tubelets=kept):
        yield


def embedding_of(encoder: nn.Module) -> Any:
    """The convolution that makes patches; None where there is none."""
    kinds = (nn.Conv2d, nn.Conv3d)
    return next((part for part in encoder.modules() if isinstance(part, kinds)), None)


def _places(encoder: nn.Module) -> tuple[int, int, int] | None:
    """(tubelets, h, w) of a VideoMAE's table of positions; None for another model."""
    if type(encoder).__name__ != "VideoMAEModel":
        return None
    config: Any = encoder.config
    side = config.image_size // config.patch_size
    return config.num_frames // config.tubelet_size, side, side


@contextmanager
def _sees(
    encoder: nn.Module, change: Callable[[Tensor], Tensor], more: dict[str, Any]
) -> Iterator[None]:
    """`encoder` is given changed pixels, and these arguments more."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pixels = kwargs.pop("pixel_values", None)
        pixels, args = (pixels, args) if pixels is not None else (args[0], args[1:])
        return (change(pixels), *args), {**kwargs, **more}

    handle = encoder.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _at_places(
    encoder: Any, size: tuple[int, int] | None = None, tubelets: list[int] | None = None
) -> Iterator[None]:
    """A VideoMAE has the positions of frames of `size` pixels and of these tubelets alone."""
    places = _places(encoder)
    if places is None:
        yield
        return
    embeddings = encoder.embeddings
    patches, whole = embeddings.patch_embeddings, embeddings.position_embeddings
    before = patches.image_size
    table = whole.view(1, *places, -1)
    if tubelets is not None:
        table = table[:, tubelets]
    if size is not None:
        patch = int(encoder.config.patch_size)
        for axis, (cells, pixels) in enumerate(zip(places[1:], size, strict=True), 2):
            at = (torch.arange(pixels // patch) + 0.5) * cells * patch / pixels
            table = table.index_select(axis, at.long().to(table.device))
        patches.image_size = size
    embeddings.position_embeddings = table.flatten(1, 3)
    try:
        yield
    finally:
        embeddings.position_embeddings, patches.image_size = whole, before
