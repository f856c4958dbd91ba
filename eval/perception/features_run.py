"""`mame-sd-eval features`: rows at equal FLOPs on a folder of pictures, kept as they are made, and
their table.

    OUT/<row>@<share>.npz      what one row gave: the knob, FLOPs, summaries and nearness of every
    picture OUT/features.json          the table's figures and the values of every picture

A stopped run continues after the last row that was written.
"""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from mame_sd.errors import UserError, first_line
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.runs.encoders import LoadedEncoder, check_size
from mame_sd.runs.files import check_place, write_atomically
from mame_sd.runs.methods import NotApplicable

from ..images import load_image
from ..networks.pretrained import DEVIATION, MEAN, DinoSaliency
from ..stats import mean_interval, paired_difference
from .data import ImageSet
from .features import (
    MEASURES,
    REFERENCE,
    ROWS,
    View,
    nearness,
    patch_of,
    same_neighbour,
    solved,
    view,
)
from .methods import Unmerged

GAPS = ("class", "patches", "map")  # the measures whose differences the table shows


class SaliencySource:
    """The DINOv2-S with its head."""

    def __init__(self, network: DinoSaliency) -> None:
        self.network, self.model = network, network.backbone
        self.mean, self.deviation = MEAN, DEVIATION

    def tokens(self, pixels: Tensor) -> Tensor:
        """See `Source`."""
        tokens: Tensor = self.model(pixels).last_hidden_state
        return tokens

    def map(self, patches: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor | None:
        """See `Source`."""
        logits = self.network.decoder(patches.transpose(1, 2).unflatten(2, grid))
        return F.interpolate(logits, size, mode="bilinear").sigmoid()


class EncoderSource:
    """Any encoder of transformers, without a dense head."""

    def __init__(self, encoder: LoadedEncoder) -> None:
        self.model, self._whole = find_encoder(encoder.model)[0], encoder
        self.mean = tuple(getattr(encoder.processor, "image_mean", None) or (0.5,) * 3)
        self.deviation = tuple(getattr(encoder.processor, "image_std", None) or (0.5,) * 3)

    def tokens(self, pixels: Tensor) -> Tensor:
        """See `Source`."""
        own = getattr(self.model.config, "image_size", None)
        sides = (own, own) if isinstance(own, int) else own
        takes = "interpolate_pos_encoding" in inspect.signature(self.model.forward).parameters
        other = sides is not None and (*sides,) != tuple(pixels.shape[-2:])
        more = {"interpolate_pos_encoding": True} if takes and other else {}
        try:
            output = self.model(pixel_values=pixels.to(self._whole.device), **more)
        except ValueError as error:
            raise UserError(
                "--size: expected one that the model can see, got"
                f" {pixels.shape[-2]}x{pixels.shape[-1]} ({first_line(error)}); change it"
            ) from error
        found: Tensor = output.last_hidden_state
        return found

    def map(self, patches: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor | None:
        """See `Source`."""
        return None


def parse_size(text: str) -> tuple[int, int]:
    """(h, w) of "224" or "392x672". Raises UserError for anything else."""
    try:
        sides = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(
            f"--size: expected pixels such as 224, or height x width such as 392x672, got {text!r};"
            " correct it"
        )
    return sides[0], sides[-1]


def parse_shares(text: str) -> list[float]:
    """Shares of FLOPs with commas between. Raises UserError for what is none."""
    try:
        shares = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < 1 for share in shares):
        raise UserError(
            f"--shares: expected numbers between 0 and 1 such as 0.45,0.3, got {text!r}; correct it"
        )
    return shares


def parse_rows(text: str | None, default: Sequence[str]) -> list[str]:
    """Names of rows with commas between; None: the default. Raises UserError for an unknown one."""
    names = list(default) if text is None else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in ROWS:
            raise UserError(
                f"--rows: expected names of {', '.join(ROWS)}, got {name!r}; correct it"
            )
    return list(dict.fromkeys(names))


def half_of(images: ImageSet, half: int | None) -> tuple[str, ...]:
    """The files of one half (1 or 2), None: all; pictures are dealt out by the order in which they
    were shuffled.

    Raises UserError for another number.
    """
    if half not in (None, 1, 2):
        raise UserError(f"--half: expected 1 or 2, got {half}; correct it")
    middle = len(images.files) // 2
    return (
        images.files
        if half is None
        else images.files[:middle]
        if half == 1
        else images.files[middle:]
    )


def cropped(
    pixels: np.ndarray, size: tuple[int, int], mean: Sequence[float], deviation: Sequence[float]
) -> Tensor:
    """A picture [H, W, 3] resized so that it covers `size` (h, w), cut to its middle, normalised:
    [1, 3, h, w].
    """
    picture = Image.fromarray(pixels)
    scale = max(size[0] / picture.height, size[1] / picture.width)
    wide, high = (
        max(size[1], round(picture.width * scale)),
        max(size[0], round(picture.height * scale)),
    )
    left, top = (wide - size[1]) // 2, (high - size[0]) // 2
    resized = picture.resize((wide, high), Image.Resampling.BICUBIC)
    cut = np.asarray(resized.crop((left, top, left + size[1], top + size[0])), np.float32) / 255
    normed = (cut - np.asarray(mean, np.float32)) / np.asarray(deviation, np.float32)
    return torch.from_numpy(normed).permute(2, 0, 1).unsqueeze(0)


@dataclass(kw_only=True)
class FeaturesRun:
    """Rows at shares of the unmerged model's FLOPs, on pictures of one size.

    Attributes:
        source: the model.
        identity: JSON values that tell it from others.
        images, files: the folder, and which of its pictures.
        size: (h, w) in pixels.
        shares: of the unmerged model's FLOPs.
        rows: names of `features.ROWS`.
        out: folder for what was made.
        on_note: takes a line for each row that is done.
    """

    source: Any
    identity: Mapping[str, Any]
    images: ImageSet
    files: Sequence[str]
    size: tuple[int, int]
    shares: Sequence[float]
    rows: Sequence[str]
    out: Path
    on_note: Callable[[str], object] = lambda line: None
    _pictures: list[Tensor] = field(default_factory=list)
    _whole: list[View] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Every row's figures.

        Raises UserError for a size that patches don't fit or a picture that can't be read.
        """
        patch = patch_of(self.source.model)
        if any(side % patch or side < 2 * patch for side in self.size):
            raise UserError(
                f"--size: expected sides that are multiples of the patches' {patch} pixels, two"
                f" patches at least, got {self.size[0]}x{self.size[1]}; change it"
            )
        if len(self.files) < 3:
            raise UserError(
                f"--data: expected 3 pictures or more to compare, got {len(self.files)}; add some"
            )
        check_place(self.out, self.out)
        self._pictures = [self._picture(self.images.folder / name) for name in self.files]
        found: list[dict[str, Any]] = []
        for share in self.shares:
            for name in self.rows:
                try:
                    made = self._row(name, share)
                except NotApplicable as error:
                    self.on_note(f"{name}: left out, {error}")
                    continue
                found.append({"row": name, "share": share, **self._figures(made)})
                self.on_note(f"{name} at {share:.0%}: done")
        results = {"about": self._about(), "files": list(self.files), "rows": _with_gaps(found)}
        write_atomically(self.out / "features.json", json.dumps(results).encode())
        return results

    def _picture(self, file: Path) -> Tensor:
        pixels = load_image(file)
        check_size(pixels, str(file))
        return cropped(pixels, self.size, self.source.mean, self.source.deviation)

    def _about(self) -> dict[str, Any]:
        pictures = self.images.digest(self.files)
        return {"model": dict(self.identity), "pictures": pictures, "size": list(self.size)}

    def _row(self, name: str, share: float) -> dict[str, np.ndarray]:
        """What one row gave, read where it lies here already."""
        row, depth = ROWS[name], len(find_encoder(self.source.model)[1])
        about = {**self._about(), "row": row.method(0.7, depth).describe(), "share": share}
        place = self.out / f"{name}@{share:g}.npz"
        done = _read(place, about)
        if done is not None:
            return done
        whole = self._whole_views()
        knob = solved(self.source, row, share * whole[0].flops, self._pictures)
        views = [view(self.source, row.method(knob, depth), picture) for picture in self._pictures]
        near = [nearness(own, other) for own, other in zip(views, whole, strict=True)]
        summaries = [torch.stack([one.summary for one in them]) for them in (views, whole)]
        made = {key: np.array([one[key] for one in near]) for key in MEASURES if key in near[0]}
        made["neighbour"] = same_neighbour(*summaries).double().numpy()
        made["flops"] = np.array(
            [own.flops / other.flops for own, other in zip(views, whole, strict=True)]
        )
        made["knob"] = np.array(knob)
        _write(place, about, made)
        return made

    def _whole_views(self) -> list[View]:
        if not self._whole:
            self._whole = [view(self.source, Unmerged(), picture) for picture in self._pictures]
            self.on_note("unmerged: done")
        return self._whole

    def _figures(self, made: Mapping[str, np.ndarray]) -> dict[str, Any]:
        values = {key: made[key].tolist() for key in (*MEASURES, "neighbour") if key in made}
        return {"knob": float(made["knob"]), "flops": float(made["flops"].mean()), "values": values}


def _with_gaps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with means and intervals over pictures, and differences from the reference row at the
    same share.
    """
    for row in rows:
        keys = {str(place): str(place) for place in range(len(row["values"]["class"]))}
        other = next(
            (one for one in rows if (one["row"], one["share"]) == (REFERENCE, row["share"])), None
        )
        row["means"] = {
            name: mean_interval(_keyed(values), keys) for name, values in row["values"].items()
        }
        if other is not None and other is not row:
            row["gaps"] = {
                name: paired_difference(_keyed(values), _keyed(other["values"][name]), keys)
                for name, values in row["values"].items()
                if name != "neighbour"
            }
    return rows


def _keyed(values: Sequence[float]) -> dict[str, float]:
    return {str(place): value for place, value in enumerate(values)}


def table(results: Mapping[str, Any]) -> str:
    """Markdown: how near each row is; then differences from a smaller image at the same share, with
    95 % intervals.
    """
    measures = [name for name in MEASURES if name in results["rows"][0]["values"]]
    heads = {
        "class": "class token",
        "patches": "patches",
        "patches_p5": "patches, 5th percentile",
        "map": "map",
    }
    near, gaps = [], []
    for row in results["rows"]:
        first = [f"{row['flops']:.1%}", ROWS[row["row"]].label]
        means = [f"{row['means'][name]['mean']:.3f}" for name in measures]
        near.append([*first, *means, f"{row['means']['neighbour']['mean']:.2f}"])
        if "gaps" in row:
            gaps.append([*first, *(_gap(row["gaps"][name]) for name in measures if name in GAPS)])
    names = ["FLOPs", "row", *(heads[name] for name in measures), "same neighbour"]
    over = [f"{heads[name]}, over smaller" for name in measures if name in GAPS]
    tables = [_markdown(names, near)]
    if gaps:
        tables.append(_markdown(["FLOPs", "row", *over], gaps))
    return "\n\n".join(tables)


def _markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(names)}", *lines[1:]])


def _gap(gap: Mapping[str, Any]) -> str:
    """A difference with its interval, as short as "+.026 [.011, .045]"."""
    text = f"{gap['mean']:+.3f} [{gap['low']:.3f}, {gap['high']:.3f}]"
    text = re.sub(r"\b0\.", ".", text)
    return f"**{text}**" if gap["low"] > 0 else text


def _read(place: Path, about: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
    """What a row's file holds of just `about`. Raises UserError for a file of another kind."""
    if not place.is_file():
        return None
    try:
        with np.load(place) as found:
            if str(found["about"]) != json.dumps(about, sort_keys=True):
                return None
            return {name: found[name] for name in found.files if name != "about"}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{place}: expected a row of features, got another file ({error}); delete it"
        ) from None


def _write(place: Path, about: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    content = io.BytesIO()
    np.savez(content, about=np.array(json.dumps(about, sort_keys=True)), **made)
    write_atomically(place, content.getvalue())
