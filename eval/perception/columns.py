"""The columns of `classify`."""

from __future__ import annotations

from ..metric_list import METRICS, Metric

COLUMNS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="flops",
            label="FLOPs",
            unit="G",
            digits=2,
            better="lower",
            block="cost",
            needs="alone",
            about=(
                "Multiply-adds of the vision transformer for one image, merging's own included:"
                " counted as tokens pass, mean over all images."
            ),
        ),
        Metric(
            name="throughput",
            label="Throughput",
            unit="images/s",
            digits=1,
            better="higher",
            block="cost",
            needs="time",
            about=(
                "Images per second from prepared images to logits: median and quartiles of"
                " interleaved rounds."
            ),
        ),
        METRICS["memory"],
        Metric(
            name="tokens",
            label="Tokens left",
            digits=1,
            better="lower",
            block="cost",
            needs="alone",
            about="After the last block, prefix tokens included, mean over all images.",
        ),
        Metric(
            name="agreement",
            label="Agreement",
            unit="%",
            digits=2,
            better="higher",
            block="fidelity",
            needs="pair",
            about=(
                "Share of images whose answer is the unmerged model's, with Wilson's 95 % interval."
            ),
        ),
        Metric(
            name="class_token",
            label="Class token",
            digits=3,
            better="higher",
            block="fidelity",
            needs="pair",
            about=(
                "Cosine to the unmerged model's class token, or to its mean over tokens: mean over"
                " images with its 95 % interval; of models that give features alone."
            ),
        ),
        Metric(
            name="patches",
            label="Patches",
            digits=3,
            better="higher",
            block="fidelity",
            needs="pair",
            about="Mean cosine to the unmerged model's patches, restored to their places.",
        ),
        Metric(
            name="top1",
            label="Top-1",
            unit="%",
            digits=2,
            better="higher",
            block="quality",
            needs="image",
            about=(
                "Share of images whose answer is their label, with Wilson's 95 % interval; p of"
                " McNemar's exact test against the unmerged model."
            ),
        ),
        Metric(
            name="ahead",
            label="Ahead of ToMe",
            unit="points",
            digits=2,
            better="higher",
            block="quality",
            needs="image",
            about=(
                "Top-1 minus that of ToMe at the same counted FLOPs, on the same images: Newcombe's"
                " 95 % interval for paired shares, p of McNemar's exact test. An interval above 0"
                " is better than ToMe, one below 0 is worse."
            ),
        ),
    )
}
