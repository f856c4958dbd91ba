"""Report what merges and is restored in each layer of a denoiser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mame_sd.core.min_tokens import BY_DEFAULT
from mame_sd.diffusion.layer import LayerStats
from mame_sd.report import TOO_FEW, LayerTokens, MeanTokens, NothingMergedError, Report, counted

# Prefixes of the lines of levels in a report.
NAMES = {"attention": "", "mlp": "MLPs, ", "block": "blocks, ", "text": "MLPs of text, "}


@dataclass(frozen=True, kw_only=True)
class LayerReport(LayerTokens):
    """Report of one layer of a denoiser, with means over its calls since the last reset.

    `merged` is False if the latest call was not merged, for the `reason` given. With `keep`
    `tokens_kept` counts keys. `size` is (h, w) in tokens if it is known. `kind` is "attention",
    "mlp", "block" or "text". For all but attention `tokens_kept` counts the tokens that were
    computed. Level 0 has the most tokens. `error` is the estimated relative error of a restored
    layer, or None if it was not estimated (`MaMeHandle.estimating_errors`).
    """

    level: int
    kind: str
    calls: int
    merged: bool
    reason: str
    size: tuple[int, ...] | None = None
    error: float | None = None

    @property
    def remark(self) -> str:
        """Return what a table says of the layer: its reason, or its estimated error."""
        error = "" if self.error is None else f"estimated error {self.error:.2f}"
        return "; ".join(filter(None, (self.reason, error)))


@dataclass(frozen=True, kw_only=True)
class LevelReport(MeanTokens):
    """Report of all layers of one kind and level, with the number of layers that merged."""

    level: int
    kind: str
    layers: int
    layers_merged: int


@dataclass(frozen=True)
class MaMeReport(Report):
    """Report of every layer of a denoiser that could merge. `str(report)` is a table.

    Attributes:
        layers: reports of self-attentions, MLPs and blocks.
        unknown: number of attentions by class that no family describes.
    """

    layers: tuple[LayerReport, ...]
    unknown: Mapping[str, int] = field(default_factory=dict)

    def levels(self) -> list[LevelReport]:
        """Summarise the called layers by level, most tokens first, weighted by calls."""
        result = []
        called = [layer for layer in self.layers if layer.calls]
        for kind, level in sorted({(layer.kind, layer.level) for layer in called}):
            group = [layer for layer in called if (layer.kind, layer.level) == (kind, level)]
            calls = sum(layer.calls for layer in group)
            result.append(
                LevelReport(
                    level=level,
                    kind=kind,
                    tokens_in=sum(layer.tokens_in * layer.calls for layer in group) / calls,
                    tokens_kept=sum(layer.tokens_kept * layer.calls for layer in group) / calls,
                    layers=len(group),
                    layers_merged=sum(layer.merged for layer in group),
                )
            )
        return result

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, with `levels` and `unknown`."""
        levels = [{**asdict(level), "share": level.share} for level in self.levels()]
        return {**super().to_dict(), "levels": levels, "unknown": dict(self.unknown)}

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers] + [len("layer")])
        lines = [f"{'layer':<{width}}  level  tokens    kept   share  calls  note"]
        for layer in self.layers:
            lines.append(
                f"{layer.name:<{width}}  {layer.level:>5}  {layer.tokens_in:>6.0f} "
                f" {layer.tokens_kept:>6.0f}  {layer.share:>5.0%} "
                f" {layer.calls:>6}  {layer.remark}".rstrip()
            )
        for level in self.levels():
            merge = "merges" if level.layers == 1 else "merge"
            lines.append(
                f"{NAMES[level.kind]}level {level.level}: {level.tokens_in:.0f} ->"
                f" {level.tokens_kept:.0f} tokens ({level.share:.0%}), {level.layers_merged} of"
                f" {counted(level.layers, 'layer')}"
                f" {merge if level.kind == 'attention' else 'restored'}"
            )
        if self.unknown:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.unknown.items()))
            lines.append(f"not merged: {kinds}, which no family describes (register_family)")
        if largest := self._left_by_default():
            lines.append(
                "no layer merges, which is the fastest way here by default;"
                f" min_tokens={largest} merges the largest anyway"
            )
        return "\n".join(lines)

    def _left_by_default(self) -> int:
        """Return the number of tokens of the largest layer that the default does not merge.

        It is 0 if any layer merges, or the default did not decide this.
        """
        called = [layer for layer in self.layers if layer.calls]
        if any(layer.merged for layer in called):
            return 0
        left = [layer.tokens_in for layer in called if layer.reason.startswith(BY_DEFAULT)]
        return round(max(left, default=0))


def make_report(
    stats: Iterable[LayerStats], unknown: Mapping[str, int] | None = None
) -> MaMeReport:
    """Make a report of `stats`, and of `unknown` attention (see `MaMeReport`).

    Raises:
        NothingMergedError: layers were called since the last reset and none could merge, for other
            reasons than the default's own rule (`mame_sd.core.min_tokens`).
    """
    rows = [(layer, *layer.totals()) for layer in stats]
    tokens = [round(total_in / calls) if calls else 0 for _, calls, total_in, _ in rows]
    ranks = {
        count: rank for rank, count in enumerate(sorted({n for n in tokens if n}, reverse=True))
    }
    layers = tuple(
        LayerReport(
            name=layer.name,
            kind=layer.kind,
            level=ranks.get(count, 0),
            tokens_in=total_in / calls if calls else 0.0,
            tokens_kept=total_kept / calls if calls else 0.0,
            calls=calls,
            merged=layer.last_reason is None,
            reason=layer.last_reason or layer.note,
            size=layer.size,
            error=layer.errors.relative(),
        )
        for (layer, calls, total_in, total_kept), count in zip(rows, tokens, strict=True)
    )
    called = [layer for layer in layers if layer.calls]
    decided = any(layer.merged or layer.reason.startswith(BY_DEFAULT) for layer in called)
    if called and not decided:
        raise NothingMergedError(_nothing_merged(called))
    return MaMeReport(layers, unknown or {})


def _nothing_merged(called: Sequence[LayerReport]) -> str:
    """Describe on one line that no layer merged: how many, why, the largest, what to do."""
    counts = Counter(layer.reason for layer in called).most_common()
    reasons = "; ".join(f"{count} of {len(called)}: {reason}" for reason, count in counts[:3])
    line = f"expected at least one layer to merge, but none did ({reasons})"
    if not any(reason.startswith(TOO_FEW) for reason, _ in counts):
        return f"{line}: remove merging, or fix what the reason names"
    largest = max(round(layer.tokens_in) for layer in called)
    return (
        f"{line}, and the largest has {largest} tokens: lower min_tokens, generate larger images,"
        " or remove merging"
    )
