"""The columns of `classify`."""

from __future__ import annotations

from ..metric_list import METRICS, Metric, cost, fidelity, quality

_FLOPS = (
    "Multiply-adds of the vision transformer for one image, merging's own included: counted as"
    " tokens pass, mean over all images."
)
_THROUGHPUT = (
    "Images per second from prepared images to logits: median and quartiles of interleaved rounds."
)
_TOKENS = "After the last block, prefix tokens included, mean over all images."
_AGREEMENT = "Share of images whose answer is the unmerged model's, with Wilson's 95 % interval."
_CLASS_TOKEN = (
    "Cosine to the unmerged model's class token, or to its mean over tokens: mean over images with"
    " its 95 % interval; of models that give features alone."
)
_PATCHES = "Mean cosine to the unmerged model's patches, restored to their places."
_TOP1 = (
    "Share of images whose answer is their label, with Wilson's 95 % interval; p of McNemar's exact"
    " test against the unmerged model."
)
_AHEAD = (
    "Top-1 minus that of ToMe at the same counted FLOPs, on the same images: Newcombe's 95 %"
    " interval for paired shares, p of McNemar's exact test. An interval above 0 is better than"
    " ToMe, one below 0 is worse."
)
COLUMNS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        cost("flops", "FLOPs", "G", 2, _FLOPS, needs="alone"),
        cost("throughput", "Throughput", "images/s", 1, _THROUGHPUT, better="higher"),
        METRICS["memory"],
        cost("tokens", "Tokens left", "", 1, _TOKENS, needs="alone"),
        fidelity("agreement", "Agreement", "higher", _AGREEMENT, unit="%", digits=2),
        fidelity("class_token", "Class token", "higher", _CLASS_TOKEN, digits=3),
        fidelity("patches", "Patches", "higher", _PATCHES, digits=3),
        quality("top1", "Top-1", "image", _TOP1, unit="%", digits=2),
        quality("ahead", "Ahead of ToMe", "image", _AHEAD, unit="points", digits=2),
    )
}
