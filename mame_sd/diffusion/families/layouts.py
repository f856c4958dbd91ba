"""Where a transformer's image lies among its tokens, read from the arguments of the model's
forward, by kind of model.

Each function takes (model, arguments) and gives `Tokens`, or the reason why they can't be told.
What makes one (`pixels`, `along`) gives a partial of a function of this module, which is pickled
with a model that is saved whole.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial, wraps
from operator import index
from typing import Any

import torch
from torch import Tensor

from mame_sd.diffusion.context import Call, Tokens
from mame_sd.diffusion.families.family import Rows, is_one_of

Layout = Callable[[Any, Call], Tokens | str | None]
Dims = int | tuple[int, ...] | list[int | None]
# Modules whose first input is an image [B, C, H, W] and whose blocks see its pixels, or patches, as
# tokens. KAttentionBlock is that of the latent upscaler's UNet.
UNET_TRANSFORMERS = ("Transformer2DModel", "TransformerSpatioTemporalModel", "KAttentionBlock")
IMAGE_MODULES = (*UNET_TRANSFORMERS, "DiTTransformer2DModel", "PixArtTransformer2DModel")
UNLIKE = "samples of a batch have their image's tokens at other positions"


def reads(*names: str) -> Callable[[Layout], Layout]:
    """Make a layout that reads values of the arguments of these names remember what it gave.

    Reading waits for the device, and a pipeline gives the same tensors at each step. What it gave
    holds for the same model and tensors, unchanged as PyTorch counts it, where all other tensors
    have the same shapes. What nothing counts, such as tensors of inference mode, is read each time.
    """

    def decorated(layout: Layout) -> Layout:
        kept: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

        @wraps(layout)
        def remembered(model: Any, call: Call) -> Tokens | str | None:
            read = [value for name in names if (value := call.get(name)) is not None]
            if not read or any(type(t) is not Tensor or t.is_inference() for t in read):
                return layout(model, call)
            others = {
                name: value.shape if isinstance(value, Tensor) else value
                for name, value in call.items()
                if name not in names and isinstance(value, (Tensor, str))
            }
            own, key = kept.setdefault(model, {}), (*map(id, read), *sorted(others.items()))
            found = own.get(key)
            if found is None or any(
                known() is not t or version != t._version
                for (known, version), t in zip(found[0], read, strict=True)
            ):
                held = [(weakref.ref(t, lambda _: own.pop(key, None)), t._version) for t in read]
                found = own[key] = held, layout(model, call)
            return found[1]

        return remembered

    return decorated


def patches(model: Any, call: Call) -> Tokens:
    """An image [B, C, H, W] or a video [B, C, T, H, W] in patches of the model's size."""
    given = next(call[name] for name in ("hidden_states", "controls_latents") if name in call)
    return Tokens(_cut(given.shape[2:], model.config))


def image_or_patches(module: Any, call: Call) -> Tokens | None:
    """UNets, DiT and PixArt: an image [B, C, H, W], of which a UNet's Transformer2DModel sees the
    pixels, the others patches.
    """
    image = call.get("hidden_states")
    if not isinstance(image, Tensor) or image.dim() != 4:
        return None
    by_pixel = is_one_of(module, UNET_TRANSFORMERS)
    by_pixel = by_pixel and not getattr(module, "is_input_patches", False)
    patch = 1 if by_pixel else int(module.config["patch_size"])
    return Tokens((index(image.shape[-2]) // patch, index(image.shape[-1]) // patch))


def pixels(name: str) -> Layout:
    """An image [..., H, W], the argument of that name, each pixel a token."""
    return partial(_pixels, name)


def _pixels(name: str, model: Any, call: Call) -> Tokens:
    return Tokens(tuple(call[name].shape[-2:]))


def of_levels(model: Any, call: Call) -> None:
    """A UNet whose attention is called with images [B, C, H, W], which tell their own rows and
    columns.
    """
    return


def sides_at(*axes: int) -> Layout:
    """A video or image, `hidden_states`, whose (t, h, w) or (h, w) are at these axes, in patches
    of the model's size.
    """
    return partial(_sides_at, axes)


def _sides_at(axes: tuple[int, ...], model: Any, call: Call) -> Tokens:
    shape = call["hidden_states"].shape
    return Tokens(_cut([shape[axis] for axis in axes], model.config))


def amused(model: Any, call: Call) -> Tokens:
    """Codes of an image [B, H, W], one token each, or one for four where the model halves sides
    first.
    """
    side = 2 if model.config["downsample"] else 1
    return Tokens(tuple(n // side for n in call["input_ids"].shape[-2:]))


def in_sequence(layout: Layout, before: int | None = 0, after: int | None = 0) -> Layout:
    """What `layout` says, with other tokens in the same sequence; None: any number (`Tokens`)."""
    return partial(_in_sequence, layout, before, after)


def _in_sequence(
    layout: Layout, before: int | None, after: int | None, model: Any, call: Call
) -> Tokens | str | None:
    found = layout(model, call)
    return replace(found, before=before, after=after) if isinstance(found, Tokens) else found


@reads("img_ids")
def packed(model: Any, call: Call) -> Tokens | str:
    """Flux and its kin: tokens [B, L, C] with their (image, row, column) in `img_ids`; tokens of
    further images stay as they are. A further image may bear the first one's number: it begins
    where places repeat or jump. (Right below the first one nothing tells it from a taller image.)
    Rows and columns are unknown where those of the first image are no grid, row after row.
    """
    if call.get("kv_cache_mode") == "extract":
        return "this call fills a cache of reference images"
    ids = call["img_ids"]  # [L, 3 or more], or of a batch
    ids = (ids[0] if ids.dim() == 3 else ids).cpu().long()
    mode = int(getattr(model, "union", False))  # of a ControlNet-Union: a token before the text
    before = mode + call["encoder_hidden_states"].shape[1]
    conditions = call.get("image_cond_hidden_states")
    behind = 0 if conditions is None else conditions.shape[1]
    same = ids[:, 0] == ids[0, 0]
    run = int(same.long().cumprod(0).sum())
    if int(same.sum()) != run:
        return Tokens((ids.shape[0],), before, behind)
    size, *others = _images(ids[:run, 1:3])
    _, counts = torch.unique_consecutive(ids[run:, 0], return_counts=True)
    others += [_grid(part[:, 1:3]) for part in ids.split([run, *counts.tolist()])[1:]]
    references = tuple(others) if all(len(one) == 2 for one in others) else ()
    behind += ids.shape[0] - math.prod(size)
    return Tokens(size, before, behind, references=references)


def qwen_image(model: Any, call: Call) -> Tokens:
    """Qwen-Image: `img_shapes`, one (t, h, w) for each sample, or a list of them, the generated
    image's first.
    """
    shapes = call["img_shapes"][0]
    first, *others = shapes if isinstance(shapes, list) else [shapes]
    if model.config.get("use_layer3d_rope"):  # Qwen-Image-Layered makes several images at once
        others = []
    text, image = call["encoder_hidden_states"].shape[1], call["hidden_states"].shape[1]
    return Tokens(
        _flat(first), text, image - math.prod(first), references=tuple(map(_flat, others))
    )


def qwen_image_21(model: Any, call: Call) -> Tokens:
    """Qwen-Image 2.1: text and reference images first; `img_shapes` of the first sample ends with
    the generated image's (t, h, w).
    """
    return Tokens(_flat(call["img_shapes"][0][-1]), before=None)


def joyimage(model: Any, call: Call) -> Tokens:
    """JoyImage: a video, or items [B, N, C, T, H, W] of which the last is generated and stands
    first among the tokens.
    """
    shape = call["hidden_states"].shape
    size = _cut(shape[-3:], model.config)
    others = shape[1] - 1 if len(shape) == 6 else 0
    return Tokens(size, after=others * math.prod(size), references=(size,) * others)


def joyimage_edit_plus(model: Any, call: Call) -> Tokens | str:
    """JoyImage Edit Plus: for each sample a list of (t, h, w), the generated image's first."""
    every = {tuple(map(_flat, shapes[1:])) for shapes in call["shape_list"]}
    references = every.pop() if len(every) == 1 else ()  # else each sample's have other places
    firsts = (_flat(shapes[0]) for shapes in call["shape_list"])
    return _alike(Tokens(size, after=None, references=references) for size in firsts)


def ltx2(model: Any, call: Call) -> Tokens | str:
    """LTX-2: the sides are arguments; tokens that conditions add stand behind."""
    sides: list[Any] = [call.get(name) for name in ("num_frames", "height", "width")]
    if None in sides:
        return "num_frames, height and width are not given"
    behind = call["hidden_states"].shape[1] - math.prod(sides)
    return Tokens(tuple(sides), after=max(behind, 0))


@reads("video_coords")
def ltx(model: Any, call: Call) -> Tokens | str:
    """LTX: the sides are arguments, or each token's time, row and column are, `video_coords`
    [B, 3, L]. Frames that conditions add stand before the video, which begins at the last frame
    that is not later than the one before it.
    """
    coordinates = call.get("video_coords")
    if coordinates is None:
        return ltx2(model, call)
    if not (coordinates == coordinates[:1]).all():
        return UNLIKE
    places = coordinates[0].cpu()  # [3, L]
    h, w = (len(axis.unique()) for axis in places[1:])
    times = places[0, :: h * w]
    back = (times[1:] <= times[:-1]).nonzero()
    first = int(back[-1]) + 1 if len(back) else 0
    video = places[:, first * h * w :]
    if not torch.equal(video.T, torch.cartesian_prod(*(axis.unique() for axis in video))):
        return "video_coords are no grid"
    return Tokens((len(times) - first, h, w), before=first * h * w)


def in_a_row(model: Any, call: Call) -> Tokens:
    """Tokens [B, L, C] of which nothing tells rows and columns."""
    return Tokens((call["hidden_states"].shape[1],))


def aura_flow(model: Any, call: Call) -> Tokens:
    """AuraFlow: its last blocks see register tokens, text and image in one sequence."""
    text = call["encoder_hidden_states"].shape[1] + model.register_tokens.shape[1]
    return replace(patches(model, call), before=text)


@reads("position_ids")
def krea2(model: Any, call: Call) -> Tokens:
    """Krea 2: text, then the image, with its rows and columns in `position_ids` [L, 3]."""
    places = call["position_ids"][-call["hidden_states"].shape[1] :, 1:3]
    return Tokens(_grid(places.cpu().long()), before=None)


@reads("indicator", "position_ids")
def ideogram4(model: Any, call: Call) -> Tokens | str:
    """Ideogram 4: padding, text and the image in one sequence.

    `indicator` [B, L] tells which tokens are the image's, `position_ids` [B, L, 3] their rows and
    columns.
    """
    constant = sys.modules[type(model).__module__].OUTPUT_IMAGE_INDICATOR
    image = (call["indicator"] == constant).cpu()
    if not (image == image[:1]).all():
        return UNLIKE
    count, first = int(image[0].sum()), int(image[0].long().argmax())
    own = slice(first, first + count)
    if not image[0, own].all():
        return "the image's tokens are not one behind the other"
    places = call["position_ids"][0, own, 1:3].cpu().long()
    return Tokens(_grid(places), first, image.shape[1] - first - count)


@reads("video_indices", "position_ids")
def minimax_h3(model: Any, call: Call) -> Tokens | str:
    """MiniMax H3: `video_indices` [n] among text and sound, `position_ids` [L, 3] with the
    generated video's frames last.
    """
    at, places = call["video_indices"].cpu(), call["position_ids"].cpu()
    ids, end = places[at, 1:], int(at[-1]) + 1
    begins = (ids == ids[0]).all(-1).nonzero()  # where a frame begins
    area = int(begins[1]) if len(begins) > 1 else len(at)
    h = len(ids[:area, 0].unique())
    if area % h:
        return "the frames are no grid"
    behind = torch.arange(end - len(at), end, device=at.device)
    run = int((at == behind).flip(0).long().cumprod(0).sum())  # that follow one another at the end
    frames = max(run // area, 1)
    return Tokens((frames, h, area // h), end - frames * area, places.shape[0] - end)


@reads("encoder_attention_mask")
def lumina2(model: Any, call: Call) -> Tokens | str:
    """Lumina 2: the caption, then the image; captions of unequal length put the image elsewhere."""
    image, lengths = patches(model, call), call["encoder_attention_mask"].sum(1).tolist()
    return _alike(replace(image, before=length) for length in lengths)


def z_image(model: Any, call: Call) -> Tokens | str:
    """Z-Image: a list of images [C, T, H, W], each filled up to a multiple of 32 tokens, and behind
    it its caption.
    """
    if isinstance(call["x"][0], list):
        return _alike(_omni(call, number) for number in range(len(call["x"])))
    return _alike(Tokens(_flat(_z_sides(call, image)), after=None) for image in call["x"])


def _z_sides(call: Call, image: Tensor) -> tuple[int, int, int]:
    """(t, h, w) in Z-Image's patches of an image [C, T, H, W]."""
    side, depth = call.get("patch_size", 2), call.get("f_patch_size", 1)
    t, h, w = image.shape[1:]
    return t // depth, h // side, w // side


@dataclass(frozen=True)
class _InWhole(Tokens):
    """Tokens in a sequence of a known length, and in no other."""

    def start(self, length: int) -> int | None:
        """See `Tokens`."""
        assert self.before is not None
        whole = self.before + self.count + (self.after or 0)
        return self.before if length == whole else None


def _omni(call: Call, number: int) -> Tokens:
    """Z-Image with references: of each sample captions, images, and what SigLIP sees of them.

    The generated image is the last one. Each part is filled up to a multiple of 32 tokens. One that
    is absent is 32 tokens too. The refiner's sequence of images alone is another one, and stays
    whole, whatever its length.
    """

    def filled(count: int) -> int:
        return max(1, math.ceil(count / 32)) * 32

    images, seen = call["x"][number], (call.get("siglip_feats") or [None])
    sides = [(0,) if image is None else _z_sides(call, image) for image in images]
    counts = [filled(math.prod(one)) for one in sides]
    before = sum(filled(len(part)) for part in call["cap_feats"][number]) + sum(counts[:-1])
    after = counts[-1] - math.prod(sides[-1])
    if seen[0] is not None:
        after += sum(filled(0 if part is None else part[..., 0].numel()) for part in seen[number])
    return _InWhole(_flat(sides[-1]), before, after)


@reads("encoder_attention_mask")
def bria_fibo2(model: Any, call: Call) -> Tokens | str:
    """Bria FIBO 2: tokens that stand for the text before the image, and references behind it;
    behind all where samples have unequal numbers of them.
    """
    from diffusers.models.transformers.transformer_bria_fibo2 import compute_gist_count

    mask = call.get("encoder_attention_mask")
    batch, _, length = call["encoder_hidden_states"].shape[:3]
    lengths = [length] * batch if mask is None else mask.sum(1).tolist()
    names = "min_num_gist_tokens max_num_gist_tokens gist_step gist_min_text_len gist_max_text_len"
    counts = compute_gist_count(lengths, *(model.config[name] for name in names.split()))
    return replace(
        patches(model, call), before=counts[0] if len(set(counts)) == 1 else 0, after=None
    )


def hidream(model: Any, call: Call) -> Tokens | str:
    """HiDream: an image [B, C, H, W], or packed tokens with `img_sizes`; filled up to the largest
    size if it is no square.
    """
    if call["hidden_states"].dim() == 4:
        return replace(patches(model, call), after=None)
    if call.get("img_sizes") is None:
        return "img_sizes are not given"
    return _alike(Tokens(tuple(map(int, size)), after=None) for size in call["img_sizes"])


def cosmos3(model: Any, call: Call) -> Tokens | str:
    """Cosmos 3: the vision tokens among those that are generated, behind which sound and actions
    may stand.
    """
    shapes = call["vision_token_shapes"]
    if len(shapes) != 1:
        return f"expected one video, got {len(shapes)}"
    return Tokens(tuple(shapes[0]), after=None)


def _alike(samples: Iterable[Tokens]) -> Tokens | str:
    """How the tokens of all samples of a batch lie."""
    found = set(samples)
    return found.pop() if len(found) == 1 else UNLIKE


def _cut(sides: Any, config: Any) -> tuple[int, ...]:
    """Sides (t, h, w) or (h, w) in patches as `config` says."""
    size, deep = config["patch_size"], config.get("patch_size_t")
    patch = ((deep or 1, size, size) if isinstance(size, int) else tuple(size))[-len(sides) :]
    cut = tuple(n // p for n, p in zip(sides, patch, strict=True))
    return cut[1:] if len(cut) == 3 and cut[0] == 1 else cut


def _flat(size: Any) -> tuple[int, ...]:
    """(t, h, w), of one frame (h, w)."""
    t, h, w = (int(n) for n in size)
    return (t, h, w) if t > 1 else (h, w)


def _grid(places: Tensor) -> tuple[int, ...]:
    """(h, w) of (row, column) pairs [L, 2] that are a grid, row after row, else (L,)."""
    places = places - places.amin(0)
    h, w = (int(n) + 1 for n in places.amax(0))
    if len(places) == h * w:
        every = (torch.arange(n, device="cpu", dtype=places.dtype) for n in (h, w))
        if torch.equal(places, torch.cartesian_prod(*every)):
            return h, w
    return (len(places),)


def _images(places: Tensor) -> list[tuple[int, ...]]:
    """(h, w) of each of the grids, row after row, that (row, column) pairs [L, 2] consist of; one
    (L,) where they don't, or where one has a single row or column.
    """
    sizes: list[tuple[int, ...]] = []
    rest = places
    while len(rest):
        along = torch.arange(len(rest), device=rest.device)
        first_row = (rest == rest[0] + torch.stack([along * 0, along], 1)).all(1)
        w = int(first_row.long().cumprod(0).sum())
        in_grid = (rest == rest[0] + torch.stack([along // w, along % w], 1)).all(1)
        h = int(in_grid.long().cumprod(0).sum()) // w
        sizes.append((h, w))
        rest = rest[h * w :]
    if len(sizes) > 1 and min(map(min, sizes)) < 2:
        return [(len(places),)]
    return sizes or [(0,)]


def along(**dims: Dims) -> Callable[[Call, Rows], dict[str, Any]]:
    """A `select` of arguments that hold one row per token along these dimensions: a tensor, or
    tuples, lists and dicts of them, as (cos, sin) is.

    A dimension of size 1 holds for all tokens. A list has the dimension of each part of a tuple,
    None where it stays.
    """
    return partial(_select, dims)


def _select(dims: dict[str, Dims], call: Call, rows: Rows) -> dict[str, Any]:
    found = {name: dim for name, dim in dims.items() if call.get(name) is not None}
    return {name: _picked(call[name], rows, dim) for name, dim in found.items()}


def _picked(value: Any, rows: Rows, dims: Dims) -> Any:
    if isinstance(dims, list):
        parts = zip(value, dims, strict=True)
        return tuple(p if dim is None else _picked(p, rows, dim) for p, dim in parts)
    if isinstance(value, (tuple, list)):
        return type(value)(_picked(part, rows, dims) for part in value)
    if isinstance(value, dict):
        return {name: _picked(part, rows, dims) for name, part in value.items()}
    for dim in (dims,) if isinstance(dims, int) else dims:
        value = value if value is None or value.shape[dim] == 1 else rows(value, dim)
    return value
