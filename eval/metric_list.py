"""List every metric by name: how tables show it, which block it belongs to, what it is computed on.

Fidelity compares an image with the baseline's of the same prompt, seed and starting noise. Quality
compares a set with a named reference set, or an image with its prompt. The two are never mixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .results.schema import Better, Block, Column
from .tables import named

# below, a distance between sets says more about the number of images than about them
MIN_IMAGES = 100
EMBEDDED_CLIP = "embedded-clip"  # it knows the subjects of the embedded models and nothing else
FID_BACKENDS = ("mame-sd", "clean-fid")  # whose code may compute FID
FEW_IMAGES = 2048  # below, a Frechet distance is biased upward enough to mislead

Needs = Literal["pair", "image", "set", "alone", "time"]


@dataclass(frozen=True, kw_only=True)
class Metric(Column):
    """One metric.

    Attributes:
        needs: what it is computed on: "pair" (an image and the baseline's), "image" (an image and
            its prompt), "set" (all images and the reference's), "alone" (all images), or "time".
        digits: digits after the decimal point.
        network: the network that it uses: a name in the list of weights, or "clip" for any CLIP.
    """

    needs: Needs
    digits: int = 4  # merged images are within 0.001 of the unmerged ones
    network: str | None = None


def fidelity(name: str, label: str, better: Better, about: str, **more: Any) -> Metric:
    """Return a metric of images and the baseline's. Arguments are fields of `Metric`."""
    block: Block = "fidelity"
    return Metric(
        name=name, label=label, better=better, block=block, needs="pair", about=about, **more
    )


def quality(name: str, label: str, needs: Needs, about: str, **more: Any) -> Metric:
    """Return a metric of images by themselves; a higher value is better by default.

    Arguments are fields of `Metric`.
    """
    fields = {"better": "higher", "block": "quality", **more}
    return Metric(name=name, label=label, needs=needs, about=about, **fields)


def cost(name: str, label: str, unit: str, digits: int, about: str, **more: Any) -> Metric:
    """Return a cost; a lower value is better by default. Arguments are fields of `Metric`."""
    fields = {"better": "lower", "block": "cost", "needs": "time", **more}
    return Metric(name=name, label=label, unit=unit, digits=digits, about=about, **fields)


_LPIPS = (
    "Learned perceptual distance to the baseline's image, AlexNet features, at the images' own"
    " resolution."
)
_PSNR = "Peak signal-to-noise ratio to the baseline's image; mean over images that differ from it."
_OBJECT = (
    "PSNR within the object of the baseline's image: pixels that differ from every colour of its"
    " border."
)
_SSIM = "Structural similarity to the baseline's image, Gaussian window of 11 pixels."
_FID = "Frechet Inception distance to the reference set."
_IS = "Inception score; at most the number of images in a split."
_CLIP = "100 x cosine of the CLIP embeddings of image and prompt (77 tokens)."
_LATENCY = "Seconds per image from prompt to pixels: median and quartiles of interleaved rounds."
_SPEEDUP = (
    "Seconds of the baseline divided by the row's in the same round, CPU seconds on a CPU: median"
    " of rounds with its 95 % interval, below 6 rounds with their range."
)
_CPU = "CPU seconds of all cores per image, which other programs hardly change; only on a CPU."
_MEMORY = "Largest total of tensors at once, weights included."
_FD = (
    "Frechet distance of DINOv2-S features (arXiv 2306.04675, there of DINOv2-L) to the reference"
    " set."
)
_KID = "Squared kernel distance of {} features (arXiv 1801.01401), unbiased, to {}."
_INCEPTION: dict[str, Any] = {"digits": 2, "network": "inception-fid"}
_TO_REFERENCE: dict[str, Any] = {"needs": "set", "better": "lower"}
_INCEPTION_SETS = {**_INCEPTION, **_TO_REFERENCE}
_DINO_SETS = {"digits": 2, "network": "dinov2-saliency", **_TO_REFERENCE}
_KID_INCEPTION = _KID.format("Inception", "the reference set, times 1,000")
_KID_DINO = _KID.format("DINOv2-S", "the reference set")
_EVERY = (
    fidelity("lpips", "LPIPS", "lower", _LPIPS, network="lpips-alex"),
    fidelity("psnr", "PSNR", "higher", _PSNR, unit="dB", digits=2),
    fidelity("psnr_object", "PSNR of the object", "higher", _OBJECT, unit="dB", digits=2),
    fidelity("ssim", "SSIM", "higher", _SSIM),
    quality("fid", "FID", about=_FID, **_INCEPTION_SETS),
    quality("kid", "KID", about=_KID_INCEPTION, **_INCEPTION_SETS),
    quality("fd_dinov2", "FD-DINOv2", about=_FD, **_DINO_SETS),
    quality("kid_dinov2", "KID-DINOv2", about=_KID_DINO, **_DINO_SETS),
    quality("is", "IS", "alone", _IS, **_INCEPTION),
    quality("clip_score", "CLIP score", "image", _CLIP, digits=2, network="clip"),
    cost("latency", "Latency", "s", 2, _LATENCY),
    cost("speedup", "Times as fast", "", 2, _SPEEDUP, better="higher"),
    cost("cpu", "CPU time", "s", 2, _CPU),
    cost("memory", "Peak memory", "MiB", 0, _MEMORY),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _EVERY}
SCORES = tuple(name for name, metric in METRICS.items() if metric.needs != "time")


def chosen_metrics(text: str) -> list[Metric]:
    """Return the metrics of ``psnr,ssim``, each once.

    Raises UserError for an unknown or empty name.
    """
    return list(named(text, {name: METRICS[name] for name in SCORES}, "--metrics").values())
