"""Figures that others measured on real cards, and what is reckoned of the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from diffusers import AutoencoderKL
from torch import nn

from benchmarks.gpu_models import CASES, MAME_07, MAME_08, PUBLISHED_ROWS, Case, rows_of
from mame_sd.core.cards import CARDS

if TYPE_CHECKING:
    from benchmarks.gpu import Traces

_4090, _3090 = "GeForce RTX 4090", "GeForce RTX 3090"


@dataclass(frozen=True)
class Figure:
    """One published time.

    Attributes:
        source: where it stands.
        card: name of the card.
        case: what was run, `images` of them at once.
        row: with what on it.
        seconds: published, of all images.
        steps: calls of the model; 0: of one call alone, without the decoder.
        chose_shares: whether the card's assumed shares were chosen by it.
    """

    source: str
    card: str
    case: str
    row: str
    seconds: float
    images: int = 1
    steps: int = 0
    chose_shares: bool = False


_DIFFUSERS = "diffusers, torch2.0.md, not compiled"
_TOME = "diffusers, tome.md"
_PAPER = "the paper, text to image"
_README = "tomesd, README"
_NVIDIA = "NVIDIA, SDXL 1.0 tensorrt, baseline"
FIGURES = (
    *(
        Figure(
            _DIFFUSERS,
            card,
            "SD 1.5 at 512",
            "unmerged",
            1 / per_second,
            images,
            chose_shares=images > 1,
        )
        for card, images, per_second in (
            (_3090, 1, 22.84),
            (_3090, 4, 6.35),
            (_3090, 16, 1.69),
            (_4090, 1, 41.89),
            (_4090, 4, 12.84),
            (_4090, 16, 3.20),
            ("A100", 1, 23.13),
            ("A100", 4, 13.12),
            ("A100", 16, 3.60),
        )
    ),
    *(
        Figure(_TOME, "A100", f"SD 1.5 at {side}", row, seconds, images, 25)
        for side, images, figures in (
            (512, 10, (6.88, 5.26, 4.69)),
            (768, 1, (3.29, 2.24, 2.03)),
            (1024, 1, (6.4, 3.61, 2.81)),
        )
        for row, seconds in zip(
            ("unfused", "unfused, tomesd 0.5", "tomesd 0.5"), figures, strict=True
        )
    ),
    *(
        Figure(_README, _4090, "SD 1.5 at 512", row, seconds, 1, 51)
        for row, seconds in (
            ("unfused", 3.09),
            ("unfused, tomesd 0.3", 2.06),
            ("unfused, tomesd 0.5", 1.65),
        )
    ),
    *(
        Figure(_PAPER, _3090, "SD 2.1 at 768, fp32", row, seconds, 1, 50)
        for row, seconds in (
            ("unmerged", 17.26),
            ("tomesd 0.25", 14.81),
            ("tomesd 0.5", 12.67),
            (MAME_07, 11.87),
            (MAME_08, 12.45),
        )
    ),
    Figure(_NVIDIA, "A100", "SDXL at 1024", "unmerged", 3.704, 1, 30),
    Figure(_NVIDIA, "H100", "SDXL at 1024", "unmerged", 2.496, 1, 30, chose_shares=True),
)
# Shares of the time that others save on cards that are not among ours, and rows that come near to
# what they do.
SAVED = (
    ("ToMA, abstract", "SDXL at 1024", 0.24, "whole tokens, half, copies"),
    ("ToMA, abstract", "SDXL at 1024", 0.24, "free: half of the tokens"),
    ("ToMA, abstract", "FLUX.1 at 1024", 0.23, "whole tokens, half, copies"),
)
# vae/config.json of stable-diffusion-v1-5, of stable-diffusion-2-1 and of
# stable-diffusion-xl-base-1.0, as far as it decides
_DECODER: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}


@dataclass(frozen=True)
class Decoder(Case):
    """The autoencoder's decoder, called once for an image."""

    def build(self, device: Any) -> nn.Module:
        return _Decoding(AutoencoderKL.from_config(_DECODER).to(device, self.dtype))

    def inputs(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Any]]:
        latents = next(model.parameters()).new_empty(self.batch, 4, self.side // 8, self.side // 8)
        return (latents,), {}, {}


class _Decoding(nn.Module):
    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, latents: Any) -> Any:
        return self.vae.decode(latents)


@contextmanager
def _nothing(model: Any) -> Iterator[None]:
    yield


def reckoned(traces: Traces, figure: Figure) -> float:
    """Seconds that are reckoned of what a figure was measured on, kernels launched from Python."""
    card, case = CARDS[figure.card], CASES[figure.case]
    of_images = replace(case, batch=2 * figure.images)
    name = f"{figure.case}, {figure.images} images"
    once = card.eager(traces.of(name, of_images, figure.row, PUBLISHED_ROWS[figure.row]))
    if not figure.steps:
        return once
    decoder = Decoder("", case.side, 1, case.dtype)
    decoding = card.eager(
        traces.of(f"decoder, {case.side}, {case.dtype}", decoder, "unmerged", _nothing)
    )
    return figure.steps * once + figure.images * decoding


def published_table(traces: Traces) -> str:
    """Every figure beside what is reckoned of it, as Markdown, and how far that is off."""
    lines = [
        "### Held against published figures",
        "",
        "| measured by | card | model, images at once | row | published, s | reckoned, s | off |",
        "|---|---|---|---|---|---|---|",
    ]
    apart: dict[bool, list[float]] = {True: [], False: []}
    for figure in FIGURES:
        ours = reckoned(traces, figure)
        off = ours / figure.seconds - 1
        apart[figure.chose_shares].append(abs(off))
        name = f"{figure.case}, {figure.images}"
        mark = ", chosen by it" if figure.chose_shares else ""
        card = figure.card.removeprefix("GeForce RTX ")
        lines.append(
            f"| {figure.source} | {card} | {name} | {figure.row} | {figure.seconds:.3f} |"
            f" {ours:.3f} | {off:+.0%}{mark} |"
        )
    rest, chosen = (sum(apart[key]) / len(apart[key]) for key in (False, True))
    lines += [
        "",
        (
            f"On average {rest:.0%} off where nothing was chosen by the figure, {chosen:.0%} where"
            " the card's shares were."
        ),
    ]
    lines += [
        "",
        "| measured by | model | published | row | reckoned |",
        "|---|---|---|---|---|",
        *(
            f"| {source} | {case} | {share:.0%} less time | {row} | {_saved(traces, case, row)} |"
            for source, case, share, row in SAVED
        ),
    ]
    return "\n".join(lines) + "\n"


def _saved(traces: Traces, name: str, row: str) -> str:
    """The least and the largest share of the time that a row saves on a card."""
    case, cards = CASES[name], CARDS.values()
    plain, merged = (
        traces.of(name, case, one, rows_of(case)[one], eager=False) for one in ("unmerged", row)
    )
    found = [1 - card.busy(merged) / card.busy(plain) for card in cards]
    return f"{min(found):.0%} to {max(found):.0%} less"
