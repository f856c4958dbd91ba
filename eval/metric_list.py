"""Every metric by name: how a table shows it, which block it belongs to, and from how many images
on it is given.

Fidelity compares an image with the baseline's of the same prompt, seed and starting noise. Quality
compares a set with a named reference set, or an image with its prompt. The two are never mixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mame_sd.errors import UserError

from .results.schema import Column

MIN_IMAGES = (
    100  # below, a distance between sets says more about the number of images than about them
)
EMBEDDED_CLIP = "embedded-clip"  # it knows the subjects of the embedded models and nothing else
FID_BACKENDS = ("mame-sd", "clean-fid")  # whose code may compute FID
FEW_IMAGES = 2048  # below, a Frechet distance is biased upward enough to mislead


Better = Literal["lower", "higher"]
Needs = Literal["pair", "image", "set", "sets", "alone", "time"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        block: fidelity, quality or cost.
        needs: what it is computed on. "pair" (image and baseline's image), "image" (image and
            prompt). "set" (all images and the reference's), "sets" (all images and the baseline's),
            "alone" (all images), or "time".
        extractor: of what network the features are ("set", "sets" and "alone").
    """

    name: str
    label: str
    better: Better
    block: Literal["fidelity", "quality", "cost"]
    needs: Needs
    about: str
    unit: str = ""
    digits: int = 4  # merged images are within 0.001 of the unmerged ones
    extractor: str | None = None

    def column(self) -> Column:
        """What a table has to know of it."""
        shared = ("label", "unit", "better", "block", "digits", "about")
        return Column(key=self.name, **{name: getattr(self, name) for name in shared})


def _near(name: str, label: str, better: Better, about: str, **more: Any) -> Metric:
    """A fidelity: of each image and the baseline's."""
    return Metric(name, label, better, "fidelity", "pair", about, **more)


def _good(name: str, label: str, needs: Needs, about: str, **more: Any) -> Metric:
    """A quality of which more is better."""
    return Metric(name, label, "higher", "quality", needs, about, **more)


def _cost(name: str, label: str, unit: str, digits: int, about: str) -> Metric:
    return Metric(name, label, "lower", "cost", "time", about, unit, digits)


_LPIPS = (
    "Learned perceptual distance to the baseline's image, {} features, at the images' own"
    " resolution."
)
_EVERY = (
    _near("lpips", "LPIPS (alex)", "lower", _LPIPS.format("AlexNet")),
    _near("lpips_vgg", "LPIPS (vgg)", "lower", _LPIPS.format("VGG-16")),
    _near(
        "psnr",
        "PSNR",
        "higher",
        "Peak signal-to-noise ratio to the baseline's image; mean over images that are not equal to"
        " it.",
        unit="dB",
        digits=2,
    ),
    _near(
        "ssim",
        "SSIM",
        "higher",
        "Structural similarity to the baseline's image, Gaussian window of 11 pixels.",
    ),
    _near(
        "clip_image",
        "CLIP image cosine",
        "higher",
        "Cosine of the CLIP embeddings of the image and the baseline's.",
    ),
    Metric(
        "fid_to_baseline",
        "FID to baseline",
        "lower",
        "fidelity",
        "sets",
        "Frechet distance to the baseline's images: fidelity, not quality.",
        digits=2,
        extractor="inception",
    ),
    Metric(
        "fid",
        "FID",
        "lower",
        "quality",
        "set",
        "Frechet Inception distance to the reference set.",
        digits=2,
        extractor="inception",
    ),
    _good(
        "is",
        "IS",
        "alone",
        "Inception score; at most the number of images in a split.",
        digits=2,
        extractor="inception",
    ),
    _good(
        "clip_score",
        "CLIP score",
        "image",
        "100 x cosine of the CLIP embeddings of image and prompt (77 tokens).",
        digits=2,
    ),
    _good(
        "retrieval",
        "Retrieval",
        "image",
        "Share of images whose nearest glyph of all 180 is the prompted one (embedded model only).",
    ),
    _good(
        "background",
        "Background",
        "image",
        "Share of images whose frame is nearest to the prompted colour (embedded model only).",
    ),
    _cost(
        "latency",
        "Latency",
        "s",
        2,
        "Seconds per image from prompt to pixels: median and quartiles of interleaved rounds.",
    ),
    _cost(
        "denoising",
        "Denoising",
        "s",
        2,
        "Of these, from the first call of the denoiser to the start of decoding.",
    ),
    _cost(
        "cpu",
        "CPU time",
        "s",
        2,
        "Seconds of all cores per image, which other programs hardly change; on a CPU alone.",
    ),
    _cost("memory", "Peak memory", "MiB", 0, "Most that tensors take at once, weights included."),
    _cost("memory_denoising", "Peak memory, denoising", "MiB", 0, "The same before decoding."),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _EVERY}
SCORES = tuple(name for name, metric in METRICS.items() if metric.needs != "time")
LPIPS_NETS = {"lpips": "alex", "lpips_vgg": "vgg"}


def chosen_metrics(text: str) -> list[Metric]:
    """The metrics of ``psnr,ssim``, each once. Raises UserError for an unknown or empty name."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in SCORES:
            raise UserError(
                f"--metrics: expected names of {', '.join(SCORES)}, got {name!r}; correct it"
            )
    return [METRICS[name] for name in names]


def withheld_for_size(metric: Metric, count: int, reference_count: int | None = None) -> str | None:
    """Why a set-wide metric is not given for so few images, or a reference of so few (None or 0:
    not known), or None.
    """
    if metric.needs not in ("set", "sets", "alone"):
        return None
    if count < MIN_IMAGES:
        return f"N = {count}, needs {MIN_IMAGES}"
    if metric.needs == "set" and reference_count and reference_count < MIN_IMAGES:
        return f"reference of {reference_count}, needs {MIN_IMAGES}"
    return None
