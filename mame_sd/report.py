"""Count what merging does in each layer, and report it."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import add
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mame_sd.core.min_tokens import BY_DEFAULT
from mame_sd.forks import free_in_children

_ADDING = free_in_children(threading.Lock())
NEVER_CALLED = "not called yet"
TOO_FEW = "fewer than "  # prefix of the reason of a layer with few tokens
# Prefixes of the lines of levels in a report.
NAMES = {"attention": "", "mlp": "MLPs, ", "block": "blocks, ", "text": "MLPs of text, "}
NOTHING_MERGES = "no layer merges"  # prefix of the warning of a forward that merged nothing


class Counts(Protocol):
    """Numbers of tokens before and after merging: of groups, a plan, or chosen tokens."""

    @property
    def tokens_in(self) -> int:
        """Return the number of tokens before merging."""

    @property
    def tokens_kept(self) -> int:
        """Return the number of tokens that were kept."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 layer", "2 layers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


class NothingMergedError(RuntimeError):
    """A forward has run, but no layer could merge although merging was asked for."""


class Sums:
    """Sums of whole numbers over calls, of several threads and of compiled regions.

    A Python number that changed at every call would recompile every call, so that compiled regions
    add to a tensor. Shapes alone are counted, so that nothing waits for the device.

    Args:
        count: number of sums.
        device: device of the sums of compiled regions. If None, these are not counted.
    """

    def __init__(self, count: int, device: torch.device | None = None) -> None:
        self.count = count
        self._compiled: Tensor | None = None
        self.reset(device)

    def reset(self, device: torch.device | None = None) -> None:
        """Set all sums to zero. Compiled regions count on `device`; if None, where they did."""
        self.eager = (0,) * self.count
        if self._compiled is not None and device in (None, self._compiled.device):
            self._compiled.zero_()
        elif device is not None:
            with torch.inference_mode(False):  # changed in place in and out of inference mode
                self._compiled = torch.zeros(self.count, dtype=torch.int64, device=device)

    def add(self, *values: int) -> None:
        """Add one value to each sum."""
        if not torch.compiler.is_compiling():
            with _ADDING:
                self.eager = tuple(map(add, self.eager, values))
        # exported graphs must not change our tensor
        elif self._compiled is not None and not torch.compiler.is_exporting():
            for place, value in enumerate(values):
                self._compiled[place].add_(value)

    def totals(self) -> tuple[int, ...]:
        """Return the sums. This waits for the device if a compiled region counted there."""
        compiled = (0,) * self.count if self._compiled is None else self._compiled.tolist()
        return tuple(map(add, self.eager, compiled))


class FitErrors:
    """Sums of a restored layer's estimated errors over calls (`ChosenTokens.left_out_error`)."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all calls."""
        self.calls = 0
        self._sums: Tensor | None = None

    def add(self, errors: Tensor, deviations: Tensor) -> None:
        """Add a call's sums of squared errors and of squared deviations from the mean."""
        sums = torch.stack([errors, deviations])
        with _ADDING:
            self.calls += 1
            self._sums = sums if self._sums is None else sums + self._sums.to(sums.device)

    def relative(self) -> float | None:
        """Return the relative error of all calls, or None if there was none. Waits for the device.

        It is 0 if the layer's outputs were all equal.
        """
        if self._sums is None:
            return None
        errors, deviations = self._sums.tolist()
        return math.sqrt(errors / deviations) if deviations else 0.0


class LayerStats:
    """Counters of one layer since the last `reset`.

    They count calls, tokens in and tokens kept. With `keep` the tokens kept are keys. `last_reason`
    is the reason why the latest call was not merged, or None if it was.

    Args:
        name: name of the layer.
        device: device of the counters of compiled regions. If None, these are not counted.
        kind: "attention", "mlp", "block", or "text" for an MLP of the text.
    """

    def __init__(
        self, name: str, device: torch.device | None = None, kind: str = "attention"
    ) -> None:
        self.name, self.kind, self.device = name, kind, device
        self.sums = Sums(3, device)
        self.errors = FitErrors()
        self.reset()

    def reset(self, device: torch.device | None = None) -> None:
        """Set all counters to zero. Compiled regions count on `device`."""
        self.sums.reset(device)
        self.errors.reset()
        self.size: tuple[int, ...] | None = None
        self.last_reason: str | None = NEVER_CALLED
        self.note = ""

    def skipped(self, reason: str, tokens: int) -> None:
        """Count a call that was not merged because of `reason`."""
        self.last_reason = reason
        self.sums.add(1, tokens, tokens)

    def merged(self, plans: Sequence[Counts], size: tuple[int, ...], note: str = "") -> None:
        """Count a call that merged.

        Args:
            plans: plans of the generated image's tokens, then those of references.
            size: size of the image in tokens.
            note: text for the report about a fallback.
        """
        self.last_reason = None
        self.size = size if len(size) > 1 else None
        self.note = note
        kept = sum(plan.tokens_kept for plan in plans)
        self.sums.add(1, sum(plan.tokens_in for plan in plans), kept)

    def computed_as_one(self, tokens: int, repeats: int) -> None:
        """Count a call with `tokens` tokens, of which `repeats` are equal and computed as one."""
        self.last_reason, self.note = None, f"{repeats} equal tokens computed as one"
        self.sums.add(1, tokens, tokens - repeats + 1)

    def totals(self) -> tuple[int, int, int]:
        """Return (calls, sum of tokens in, sum of tokens kept)."""
        calls, tokens_in, tokens_kept = self.sums.totals()
        return calls, tokens_in, tokens_kept


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Mean numbers of tokens over calls."""

    tokens_in: float
    tokens_kept: float

    @property
    def share(self) -> float:
        """Return tokens kept / tokens in, 1 before the first call."""
        return self.tokens_kept / self.tokens_in if self.tokens_in else 1.0


@dataclass(frozen=True, kw_only=True)
class LayerTokens(_Tokens):
    """Mean numbers of tokens before and after one layer.

    Attributes:
        name: name of the layer.
        tokens_in: tokens before it.
        tokens_kept: tokens that it kept or computed.
    """

    name: str


class Report(ABC):
    """Say what merged since the last `reset`. Every handle's `report()` returns a subclass.

    `str(report)` is for people, `to_dict()` for programs.

    Attributes:
        layers: numbers of tokens of each layer, in the order of the model.
    """

    layers: tuple[LayerTokens, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"layers": [{**asdict(layer), "share": layer.share} for layer in self.layers]}

    @abstractmethod
    def __str__(self) -> str: ...


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
class LevelReport(_Tokens):
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
                f" min_tokens={largest} merges the largest all the same"
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


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter, or the CPU if it has none."""
    first: Tensor | None = next(iter(module.parameters()), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device
