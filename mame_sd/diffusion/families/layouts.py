"""Read the layout of a transformer's tokens from the arguments of the model's forward.

There is one function for each kind of model. It takes (model, arguments) and returns `Tokens`, or
the reason why the layout is unknown. Functions that make a layout (`pixels`, `along`) return a
partial of a function of this module, which is pickled with a model that is saved whole.
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
# Modules whose first input is an image [B, C, H, W], whose pixels or patches are the tokens.
# KAttentionBlock is a part of the latent upscaler's UNet.
UNET_TRANSFORMERS = ("Transformer2DModel", "TransformerSpatioTemporalModel", "KAttentionBlock")
IMAGE_MODULES = (*UNET_TRANSFORMERS, "DiTTransformer2DModel", "PixArtTransformer2DModel")
UNLIKE = "samples of a batch have their image's tokens at other positions"


def cached_by_tensor(*names: str) -> Callable[[Layout], Layout]:
    """Cache a layout that reads values of the arguments of these names.

    Reading waits for the device, and a pipeline passes the same tensors at each step. The cached
    layout is used for the same model and the same unchanged tensors, if all other tensors have the
    same shapes. Tensors whose changes PyTorch does not count, such as inference tensors, are read
    each time.
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
            of_model, key = kept.setdefault(model, {}), (*map(id, read), *sorted(others.items()))
            entry = of_model.get(key)
            if entry is None or any(
                reference() is not t or version != t._version
                for (reference, version), t in zip(entry[0], read, strict=True)
            ):
                held = [
                    (weakref.ref(t, lambda _: of_model.pop(key, None)), t._version) for t in read
                ]
                entry = of_model[key] = held, layout(model, call)
            return entry[1]

        return remembered

    return decorated


def patches(model: Any, call: Call) -> Tokens:
    """Return the layout of an image [B, C, H, W] or a video [B, C, T, H, W], in patches."""
    latents = next(call[name] for name in ("hidden_states", "controls_latents") if name in call)
    return Tokens(_cut(latents.shape[2:], model.config))


def image_or_patches(module: Any, call: Call) -> Tokens | None:
    """Return the layout of an image [B, C, H, W] in a UNet, DiT or PixArt.

    The tokens of a UNet's Transformer2DModel are pixels, those of the others are patches.
    """
    image = call.get("hidden_states")
    if not isinstance(image, Tensor) or image.dim() != 4:
        return None
    by_pixel = is_one_of(module, UNET_TRANSFORMERS)
    by_pixel = by_pixel and not getattr(module, "is_input_patches", False)
    patch = 1 if by_pixel else int(module.config["patch_size"])
    return Tokens((index(image.shape[-2]) // patch, index(image.shape[-1]) // patch))


def pixels(name: str) -> Layout:
    """Return a layout of an image [..., H, W], the argument of that name. Each pixel is a token."""
    return partial(_pixels, name)


def _pixels(name: str, model: Any, call: Call) -> Tokens:
    return Tokens(tuple(call[name].shape[-2:]))


def of_levels(model: Any, call: Call) -> None:
    """Return None for a UNet whose attention is called with images [B, C, H, W].

    These have their own rows and columns at each level.
    """
    return


def sides_at(*axes: int) -> Layout:
    """Return a layout of a video or image, `hidden_states`, in patches of the model's size.

    Its (t, h, w) or (h, w) are at these axes.
    """
    return partial(_sides_at, axes)


def _sides_at(axes: tuple[int, ...], model: Any, call: Call) -> Tokens:
    shape = call["hidden_states"].shape
    return Tokens(_cut([shape[axis] for axis in axes], model.config))


def amused(model: Any, call: Call) -> Tokens:
    """Return the layout of the codes of an image [B, H, W].

    Each code is a token, or four codes are if the model first halves the sides.
    """
    side = 2 if model.config["downsample"] else 1
    return Tokens(tuple(n // side for n in call["input_ids"].shape[-2:]))


def in_sequence(layout: Layout, before: int | None = 0, after: int | None = 0) -> Layout:
    """Return a layout with other tokens in the same sequence.

    Args:
        layout: layout of the image.
        before: number of tokens before the image. If None, any number.
        after: number of tokens after the image. If None, any number (see `Tokens`).
    """
    return partial(_in_sequence, layout, before, after)


def _in_sequence(
    layout: Layout, before: int | None, after: int | None, model: Any, call: Call
) -> Tokens | str | None:
    tokens = layout(model, call)
    return replace(tokens, before=before, after=after) if isinstance(tokens, Tokens) else tokens


@cached_by_tensor("img_ids")
def packed(model: Any, call: Call) -> Tokens | str:
    """Return the layout of tokens [B, L, C] of Flux and similar models.

    Their (image, row, column) are in `img_ids`. Tokens of further images stay as they are. A
    further image may have the same number as the first: it begins where positions repeat or jump.
    Directly below the first image it can't be distinguished from a taller image. Rows and columns
    are unknown if the first image is no grid, row by row.
    """
    if call.get("kv_cache_mode") == "extract":
        return "this call fills a cache of reference images"
    ids = call["img_ids"]  # [L, 3 or more], or [B, L, 3 or more]
    ids = (ids[0] if ids.dim() == 3 else ids).cpu().long()
    mode = int(getattr(model, "union", False))  # ControlNet-Union has a token before the text
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
    """Return the layout of Qwen-Image.

    `img_shapes` holds one (t, h, w) for each sample, or a list of them with the generated image's
    first.
    """
    shapes = call["img_shapes"][0]
    first, *others = shapes if isinstance(shapes, list) else [shapes]
    if model.config.get("use_layer3d_rope"):  # Qwen-Image-Layered generates several images
        others = []
    text, image = call["encoder_hidden_states"].shape[1], call["hidden_states"].shape[1]
    return Tokens(
        _flat(first), text, image - math.prod(first), references=tuple(map(_flat, others))
    )


def qwen_image_21(model: Any, call: Call) -> Tokens:
    """Return the layout of Qwen-Image 2.1, with text and reference images first.

    `img_shapes` of the first sample ends with the generated image's (t, h, w).
    """
    return Tokens(_flat(call["img_shapes"][0][-1]), before=None)


def joyimage(model: Any, call: Call) -> Tokens:
    """Return the layout of JoyImage: a video, or items [B, N, C, T, H, W].

    The last of the items is generated, and its tokens come first.
    """
    shape = call["hidden_states"].shape
    size = _cut(shape[-3:], model.config)
    others = shape[1] - 1 if len(shape) == 6 else 0
    return Tokens(size, after=others * math.prod(size), references=(size,) * others)


def joyimage_edit_plus(model: Any, call: Call) -> Tokens | str:
    """Return the layout of JoyImage Edit Plus.

    Each sample has a list of (t, h, w), with the generated image's first.
    """
    every = {tuple(map(_flat, shapes[1:])) for shapes in call["shape_list"]}
    references = every.pop() if len(every) == 1 else ()  # else positions differ by sample
    firsts = (_flat(shapes[0]) for shapes in call["shape_list"])
    return _alike(Tokens(size, after=None, references=references) for size in firsts)


def ltx2(model: Any, call: Call) -> Tokens | str:
    """Return the layout of LTX-2, whose sides are arguments.

    Tokens that conditions add follow the video.
    """
    sides: list[Any] = [call.get(name) for name in ("num_frames", "height", "width")]
    if None in sides:
        return "num_frames, height and width are not given"
    behind = call["hidden_states"].shape[1] - math.prod(sides)
    return Tokens(tuple(sides), after=max(behind, 0))


@cached_by_tensor("video_coords")
def ltx(model: Any, call: Call) -> Tokens | str:
    """Return the layout of LTX.

    The sides are arguments, or `video_coords` [B, 3, L] holds each token's time, row and column.
    Frames that conditions add precede the video, which begins at the last frame that is not later
    than the frame before it.
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
    """Return the layout of tokens [B, L, C] whose rows and columns are unknown."""
    return Tokens((call["hidden_states"].shape[1],))


def aura_flow(model: Any, call: Call) -> Tokens:
    """Return the layout of AuraFlow.

    Its last blocks read register tokens, text and image in one sequence.
    """
    text = call["encoder_hidden_states"].shape[1] + model.register_tokens.shape[1]
    return replace(patches(model, call), before=text)


@cached_by_tensor("position_ids")
def krea2(model: Any, call: Call) -> Tokens:
    """Return the layout of Krea 2: text, then the image.

    `position_ids` [L, 3] holds rows and columns.
    """
    places = call["position_ids"][-call["hidden_states"].shape[1] :, 1:3]
    return Tokens(_grid(places.cpu().long()), before=None)


@cached_by_tensor("indicator", "position_ids")
def ideogram4(model: Any, call: Call) -> Tokens | str:
    """Return the layout of Ideogram 4: padding, text and the image in one sequence.

    `indicator` [B, L] marks the image's tokens, and `position_ids` [B, L, 3] holds their rows and
    columns.
    """
    constant = sys.modules[type(model).__module__].OUTPUT_IMAGE_INDICATOR
    image = (call["indicator"] == constant).cpu()
    if not (image == image[:1]).all():
        return UNLIKE
    count, first = int(image[0].sum()), int(image[0].long().argmax())
    span = slice(first, first + count)
    if not image[0, span].all():
        return "the image's tokens are not one behind the other"
    places = call["position_ids"][0, span, 1:3].cpu().long()
    return Tokens(_grid(places), first, image.shape[1] - first - count)


@cached_by_tensor("video_indices", "position_ids")
def minimax_h3(model: Any, call: Call) -> Tokens | str:
    """Return the layout of MiniMax H3.

    `video_indices` [n] are the video's positions among text and sound, and `position_ids` [L, 3]
    has the generated video's frames last.
    """
    at, places = call["video_indices"].cpu(), call["position_ids"].cpu()
    ids, end = places[at, 1:], int(at[-1]) + 1
    begins = (ids == ids[0]).all(-1).nonzero()  # positions where frames begin
    area = int(begins[1]) if len(begins) > 1 else len(at)
    h = len(ids[:area, 0].unique())
    if area % h:
        return "the frames are no grid"
    behind = torch.arange(end - len(at), end, device=at.device)
    run = int((at == behind).flip(0).long().cumprod(0).sum())  # consecutive tokens at the end
    frames = max(run // area, 1)
    return Tokens((frames, h, area // h), end - frames * area, places.shape[0] - end)


@cached_by_tensor("encoder_attention_mask")
def lumina2(model: Any, call: Call) -> Tokens | str:
    """Return the layout of Lumina 2: the caption, then the image.

    Captions of unequal length put the images of a batch at different positions.
    """
    image, lengths = patches(model, call), call["encoder_attention_mask"].sum(1).tolist()
    return _alike(replace(image, before=length) for length in lengths)


def z_image(model: Any, call: Call) -> Tokens | str:
    """Return the layout of Z-Image: a list of images [C, T, H, W].

    Each image is padded to a multiple of 32 tokens and followed by its caption.
    """
    if isinstance(call["x"][0], list):
        return _alike(_omni(call, number) for number in range(len(call["x"])))
    return _alike(Tokens(_flat(_z_sides(call, image)), after=None) for image in call["x"])


def _z_sides(call: Call, image: Tensor) -> tuple[int, int, int]:
    """Return (t, h, w) of an image [C, T, H, W] in Z-Image's patches."""
    side, depth = call.get("patch_size", 2), call.get("f_patch_size", 1)
    t, h, w = image.shape[1:]
    return t // depth, h // side, w // side


@dataclass(frozen=True)
class _InWhole(Tokens):
    """Tokens in a sequence of a known length, and in no other sequence."""

    def start(self, length: int) -> int | None:
        """Return the position of the first token, see `Tokens`."""
        assert self.before is not None
        whole = self.before + self.count + (self.after or 0)
        return self.before if length == whole else None


def _omni(call: Call, number: int) -> Tokens:
    """Return the layout of a sample of Z-Image with references: captions, images, SigLIP features.

    The generated image is the last one. Each part is padded to a multiple of 32 tokens, and an
    absent part is 32 tokens too. The refiner's sequence of images alone is a different one, which
    does not merge, whatever its length.
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


@cached_by_tensor("encoder_attention_mask")
def bria_fibo2(model: Any, call: Call) -> Tokens | str:
    """Return the layout of Bria FIBO 2.

    Tokens that stand for the text precede the image, and references follow it. If samples have
    unequal numbers of such tokens, they follow everything else.
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
    """Return the layout of HiDream: an image [B, C, H, W], or packed tokens with `img_sizes`.

    Tokens are padded to the largest size if the image is not square.
    """
    if call["hidden_states"].dim() == 4:
        return replace(patches(model, call), after=None)
    if call.get("img_sizes") is None:
        return "img_sizes are not given"
    return _alike(Tokens(tuple(map(int, size)), after=None) for size in call["img_sizes"])


def cosmos3(model: Any, call: Call) -> Tokens | str:
    """Return the layout of Cosmos 3: the vision tokens among the generated ones.

    Sound and actions may follow them.
    """
    shapes = call["vision_token_shapes"]
    if len(shapes) != 1:
        return f"expected one video, got {len(shapes)}"
    return Tokens(tuple(shapes[0]), after=None)


def _alike(samples: Iterable[Tokens]) -> Tokens | str:
    """Return the layout that all samples of a batch share, or the reason if they differ."""
    layouts = set(samples)
    return layouts.pop() if len(layouts) == 1 else UNLIKE


def _cut(sides: Any, config: Any) -> tuple[int, ...]:
    """Return sides (t, h, w) or (h, w) in patches of the size in `config`."""
    size, deep = config["patch_size"], config.get("patch_size_t")
    patch = ((deep or 1, size, size) if isinstance(size, int) else tuple(size))[-len(sides) :]
    cut = tuple(n // p for n, p in zip(sides, patch, strict=True))
    return cut[1:] if len(cut) == 3 and cut[0] == 1 else cut


def _flat(size: Any) -> tuple[int, ...]:
    """Return (t, h, w), or (h, w) for a single frame."""
    t, h, w = (int(n) for n in size)
    return (t, h, w) if t > 1 else (h, w)


def _grid(places: Tensor) -> tuple[int, ...]:
    """Return (h, w) of (row, column) pairs [L, 2] that are a grid, row by row, else (L,)."""
    sizes = _images(places)
    return sizes[0] if len(sizes) == 1 else (len(places),)


def _images(places: Tensor) -> list[tuple[int, ...]]:
    """Return (h, w) of each grid that (row, column) pairs [L, 2] consist of, row by row.

    The result is one (L,) if they aren't grids, or one of them has a single row or column.
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
    """Return a `select` for arguments with one row per token along these dimensions.

    An argument may be a tensor, or tuples, lists and dicts of tensors, such as (cos, sin). A
    dimension of size 1 applies to all tokens. A list gives the dimension for each part of a tuple,
    None for parts that stay as they are.
    """
    return partial(_select, dims)


def _select(dims: dict[str, Dims], call: Call, rows: Rows) -> dict[str, Any]:
    axes = {name: dim for name, dim in dims.items() if call.get(name) is not None}
    return {name: _picked(call[name], rows, dim) for name, dim in axes.items()}


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
