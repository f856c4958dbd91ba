"""Every metric by name: how a table shows it, which block it belongs to, and from how many images
on it is given.

Fidelity compares an image with the baseline's of the same prompt, seed and starting noise. Quality
compares a set with a named reference set, or an image with its prompt. The two are never mixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mame_sd.errors import UserError

from .results.schema import Column

MIN_IMAGES = (
    100  # below, a distance between sets says more about the number of images than about them
)
FID_BACKENDS = ("mame-sd", "clean-fid")  # whose code may compute FID and KID
EMBEDDED_CLIP = "embedded-clip"  # it knows the subjects of the embedded models and nothing else
FEW_IMAGES = 2048  # below, a Frechet distance is biased upward enough to mislead


@dataclass(frozen=True, kw_only=True)
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
    better: Literal["lower", "higher"]
    block: Literal["fidelity", "quality", "cost"]
    needs: Literal["pair", "image", "set", "sets", "alone", "time"]
    about: str
    unit: str = ""
    digits: int = 4  # merged images are within 0.001 of the unmerged ones
    extractor: str | None = None

    def column(self) -> Column:
        """What a table has to know of it."""
        return Column(
            self.name, self.label, self.unit, self.better, self.block, self.digits, self.about
        )


_OFFLINE = (
    " Features of EfficientNet-Lite0 on ImageNet, not of FID's Inception: comparable only with"
    " itself."
)
_LPIPS = (
    "Learned perceptual distance to the baseline's image, {} features, at the images' own"
    " resolution."
)
_PAIRED_KID = (
    "Kernel distance to the baseline's images, unbiased: pairs of one prompt and seed left out."
    " Fidelity, not quality."
)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="lpips",
            label="LPIPS (alex)",
            better="lower",
            block="fidelity",
            needs="pair",
            about=_LPIPS.format("AlexNet"),
        ),
        Metric(
            name="lpips_vgg",
            label="LPIPS (vgg)",
            better="lower",
            block="fidelity",
            needs="pair",
            about=_LPIPS.format("VGG-16"),
        ),
        Metric(
            name="lpips_squeeze",
            label="LPIPS (squeeze)",
            better="lower",
            block="fidelity",
            needs="pair",
            about=_LPIPS.format("SqueezeNet"),
        ),
        Metric(
            name="psnr",
            label="PSNR",
            unit="dB",
            digits=2,
            better="higher",
            block="fidelity",
            needs="pair",
            about=(
                "Peak signal-to-noise ratio to the baseline's image; mean over images that are not"
                " equal to it."
            ),
        ),
        Metric(
            name="ssim",
            label="SSIM",
            better="higher",
            block="fidelity",
            needs="pair",
            about="Structural similarity to the baseline's image, Gaussian window of 11 pixels.",
        ),
        Metric(
            name="ms_ssim",
            label="MS-SSIM",
            better="higher",
            block="fidelity",
            needs="pair",
            about="Structural similarity over five scales.",
        ),
        Metric(
            name="clip_image",
            label="CLIP image cosine",
            better="higher",
            block="fidelity",
            needs="pair",
            about="Cosine of the CLIP embeddings of the image and the baseline's.",
        ),
        Metric(
            name="fid_to_baseline",
            label="FID to baseline",
            digits=2,
            better="lower",
            block="fidelity",
            needs="sets",
            extractor="inception",
            about="Frechet distance to the baseline's images: fidelity, not quality.",
        ),
        Metric(
            name="kid_to_baseline",
            label="KID to baseline",
            digits=5,
            better="lower",
            block="fidelity",
            needs="sets",
            extractor="inception",
            about=_PAIRED_KID,
        ),
        Metric(
            name="kid_effnet_to_baseline",
            label="KID-EffNetLite0 to baseline",
            digits=5,
            better="lower",
            block="fidelity",
            needs="sets",
            extractor="effnet-lite0",
            about=_PAIRED_KID + _OFFLINE,
        ),
        Metric(
            name="fid",
            label="FID",
            digits=2,
            better="lower",
            block="quality",
            needs="set",
            extractor="inception",
            about="Frechet Inception distance to the reference set.",
        ),
        Metric(
            name="kid",
            label="KID",
            digits=5,
            better="lower",
            block="quality",
            needs="set",
            extractor="inception",
            about="Kernel Inception distance to the reference set, unbiased.",
        ),
        Metric(
            name="is",
            label="IS",
            digits=2,
            better="higher",
            block="quality",
            needs="alone",
            extractor="inception",
            about="Inception score; at most the number of images in a split.",
        ),
        Metric(
            name="fd_effnet",
            label="FD-EffNetLite0",
            digits=3,
            better="lower",
            block="quality",
            needs="set",
            extractor="effnet-lite0",
            about="Frechet distance to the reference set." + _OFFLINE,
        ),
        Metric(
            name="kid_effnet",
            label="KID-EffNetLite0",
            digits=5,
            better="lower",
            block="quality",
            needs="set",
            extractor="effnet-lite0",
            about="Kernel distance to the reference set." + _OFFLINE,
        ),
        Metric(
            name="is_effnet",
            label="IS-EffNetLite0",
            digits=2,
            better="higher",
            block="quality",
            needs="alone",
            extractor="effnet-lite0",
            about="Inception-style score." + _OFFLINE,
        ),
        Metric(
            name="clip_score",
            label="CLIP score",
            digits=2,
            better="higher",
            block="quality",
            needs="image",
            about="100 x cosine of the CLIP embeddings of image and prompt (77 tokens).",
        ),
        Metric(
            name="retrieval",
            label="Retrieval",
            better="higher",
            block="quality",
            needs="image",
            about=(
                "Share of images whose nearest glyph of all 180 is the prompted one (embedded model"
                " only)."
            ),
        ),
        Metric(
            name="background",
            label="Background",
            better="higher",
            block="quality",
            needs="image",
            about=(
                "Share of images whose frame is nearest to the prompted colour (embedded model"
                " only)."
            ),
        ),
        Metric(
            name="latency",
            label="Latency",
            unit="s",
            digits=2,
            better="lower",
            block="cost",
            needs="time",
            about=(
                "Seconds per image from prompt to pixels: median and quartiles of interleaved"
                " rounds."
            ),
        ),
        Metric(
            name="denoising",
            label="Denoising",
            unit="s",
            digits=2,
            better="lower",
            block="cost",
            needs="time",
            about="Of these, from the first call of the denoiser to the start of decoding.",
        ),
        Metric(
            name="cpu",
            label="CPU time",
            unit="s",
            digits=2,
            better="lower",
            block="cost",
            needs="time",
            about=(
                "Seconds of all cores per image, which other programs hardly change; on a CPU"
                " alone."
            ),
        ),
        Metric(
            name="memory",
            label="Peak memory",
            unit="MiB",
            digits=0,
            better="lower",
            block="cost",
            needs="time",
            about="Most that tensors take at once, weights included.",
        ),
        Metric(
            name="memory_denoising",
            label="Peak memory, denoising",
            unit="MiB",
            digits=0,
            better="lower",
            block="cost",
            needs="time",
            about="The same before decoding.",
        ),
    )
}
SCORES = tuple(name for name, metric in METRICS.items() if metric.needs != "time")
LPIPS_NETS = {"lpips": "alex", "lpips_vgg": "vgg", "lpips_squeeze": "squeeze"}


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
