"""What merging did: counters that layers fill during a forward, and the report that is made of
them.

Counters are plain numbers outside compiled regions. Inside one (`torch.compile`) they are a tensor,
because a Python number that changes in every call would recompile every call. Both count shapes
only, so nothing waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.core.plan import Plan

NEVER_CALLED = "not called yet"
TOO_FEW = "fewer than min_tokens"  # begins the reason of a layer with few tokens
NOTHING_MERGES = "no layer merges"  # begins the warning of a first forward that merged nothing


class NothingMergedError(RuntimeError):
    """A forward has run and no layer could merge: merging was asked for and did not happen."""


class LayerStats:
    """Counters of one layer since the last `reset`: calls, tokens in, tokens kept, and why it was
    skipped.

    With merge "kv" the tokens kept are keys. `last_reason` is None when the latest call could
    merge. `part` is what the layer computes: "attention" (self-attention), or the setting that
    merges it, "mlp".
    """

    def __init__(
        self, name: str, device: torch.device | None = None, part: str = "attention"
    ) -> None:
        self.name = name
        self.part = part
        self.capture = False
        self.compiled: Tensor | None = (
            None  # [3] int64: calls, tokens in, tokens kept; None: not counted there
        )
        self.reset(device)

    def reset(self, device: torch.device | None = None) -> None:
        """Back to zero calls; a captured plan is dropped too.

        `device` is where compiled regions are to count.
        """
        self.calls = self.tokens_in = self.tokens_kept = 0
        if self.compiled is not None and device in (None, self.compiled.device):
            self.compiled.zero_()
        elif device is not None:
            with torch.inference_mode(False):  # counted in place, in and out of inference mode
                self.compiled = torch.zeros(3, dtype=torch.int64, device=device)
        self.size: tuple[int, ...] | None = None
        self.last_reason: str | None = NEVER_CALLED
        self.left = False  # whether the latest call was left alone as nothing is gained
        self.note = ""
        self.plan: Plan | None = None

    def skipped(self, reason: str, tokens: int) -> None:
        """A call passed through untouched, because of `reason`."""
        self.last_reason, self.left = reason, False
        self._count(tokens, tokens)

    def merged(
        self, plan: Plan, size: tuple[int, ...] | None, *notes: str, kept: int | None = None
    ) -> None:
        """A call merged by `plan` over (h, w) or (t, h, w) = `size`; `notes` that are not empty
        tell of fallbacks.
        """
        self.last_reason, self.left = None, False
        self.size = size
        self.note = "; ".join(filter(None, notes))
        self._count(plan.tokens_in, plan.tokens_kept if kept is None else kept)
        if self.capture and not torch.compiler.is_compiling():
            self.plan = plan

    def kept_all(self, plan: Plan, size: tuple[int, ...] | None, *notes: str) -> None:
        """A call in which all tokens were kept, because merging them by `plan` saves nothing;
        `notes` tell why.
        """
        self.merged(plan, size, *notes, kept=plan.tokens_in)

    def left_unmerged(self, tokens: int, size: tuple[int, ...], note: str) -> None:
        """A call in which all tokens were kept before any was compared; `note` tells why."""
        self.last_reason, self.size, self.note, self.left = None, size, note, True
        self._count(tokens, tokens)

    def _count(self, tokens_in: int, tokens_kept: int) -> None:
        if not torch.compiler.is_compiling():
            self.calls += 1
            self.tokens_in += tokens_in
            self.tokens_kept += tokens_kept
        elif (
            self.compiled is not None and not torch.compiler.is_exporting()
        ):  # whose graphs change no tensor of ours
            self.compiled[0].add_(1)
            self.compiled[1].add_(tokens_in)
            self.compiled[2].add_(tokens_kept)

    def totals(self) -> tuple[int, int, int]:
        """(calls, sum of tokens in, sum of tokens kept); waits for the device if a compiled region
        counted there.
        """
        extra = [0, 0, 0] if self.compiled is None else self.compiled.tolist()
        return self.calls + extra[0], self.tokens_in + extra[1], self.tokens_kept + extra[2]


@dataclass(frozen=True)
class LayerReport:
    """One layer: means over its calls since the last reset.

    `part` is "attention" (self-attention) or "mlp". `level` counts from 0, the layers with
    the most tokens. `merged` is False when the layer was left alone, for the `reason` given. With
    merge "kv" `tokens_kept` counts keys. `size` is (h, w) in tokens where it was known.
    """

    name: str
    level: int
    tokens_in: float
    tokens_kept: float
    calls: int
    merged: bool
    reason: str
    size: tuple[int, ...] | None = None
    part: str = "attention"

    @property
    def share(self) -> float:
        """Tokens kept / tokens in; 1 before the first call."""
        return self.tokens_kept / self.tokens_in if self.tokens_in else 1.0


@dataclass(frozen=True)
class LevelReport:
    """All layers of one level: tokens per layer and call, how many of the layers merged."""

    level: int
    tokens_in: float
    tokens_kept: float
    layers: int
    layers_merged: int

    @property
    def share(self) -> float:
        """Tokens kept / tokens in."""
        return self.tokens_kept / self.tokens_in if self.tokens_in else 1.0


@dataclass(frozen=True)
class MaMeReport:
    """Every layer that could merge, MLPs where these are on; `str(report)` is a table."""

    layers: tuple[LayerReport, ...]

    def levels(self, part: str = "attention") -> list[LevelReport]:
        """The layers of one part that were called, by level, most tokens first; means weighted by
        calls.
        """
        called = [layer for layer in self.layers if layer.calls and layer.part == part]
        result = []
        for level in sorted({layer.level for layer in called}):
            group = [layer for layer in called if layer.level == level]
            calls = sum(layer.calls for layer in group)
            result.append(
                LevelReport(
                    level=level,
                    tokens_in=sum(layer.tokens_in * layer.calls for layer in group) / calls,
                    tokens_kept=sum(layer.tokens_kept * layer.calls for layer in group) / calls,
                    layers=len(group),
                    layers_merged=sum(layer.merged for layer in group),
                )
            )
        return result

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values: `layers` and `levels` (of self-attention), each a list of
        objects.
        """
        return {
            "layers": [{**asdict(layer), "share": layer.share} for layer in self.layers],
            "levels": [{**asdict(level), "share": level.share} for level in self.levels()],
        }

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers] + [len("layer")])
        lines = [f"{'layer':<{width}}  level  tokens    kept   share  calls  note"]
        for layer in self.layers:
            lines.append(
                f"{layer.name:<{width}}  {layer.level:>5}  {layer.tokens_in:>6.0f} "
                f" {layer.tokens_kept:>6.0f}  {layer.share:>5.0%} "
                f" {layer.calls:>6}  {layer.reason}".rstrip()
            )
        for part in dict.fromkeys(layer.part for layer in self.layers):
            name = "" if part == "attention" else f", {part}"
            for level in self.levels(part):
                lines.append(
                    f"level {level.level}{name}: {level.tokens_in:.0f} -> {level.tokens_kept:.0f}"
                    f" tokens ({level.share:.0%}), {level.layers_merged} of {level.layers}"
                    f" layer{'s' * (level.layers > 1)} merge"
                )
        return "\n".join(lines)


def make_report(stats: Iterable[LayerStats]) -> MaMeReport:
    """The report of `stats`.

    Raises:
        NothingMergedError: layers were called since the last reset, and not one of them could
            merge.
    """
    rows = [(layer, *layer.totals()) for layer in stats]
    tokens = [round(total_in / calls) if calls else 0 for _, calls, total_in, _ in rows]
    ranks = {
        count: rank for rank, count in enumerate(sorted({n for n in tokens if n}, reverse=True))
    }
    layers = tuple(
        LayerReport(
            name=layer.name,
            level=ranks.get(count, 0),
            tokens_in=total_in / calls if calls else 0.0,
            tokens_kept=total_kept / calls if calls else 0.0,
            calls=calls,
            merged=layer.last_reason is None,
            reason=layer.last_reason or layer.note,
            size=layer.size,
            part=layer.part,
        )
        for (layer, calls, total_in, total_kept), count in zip(rows, tokens, strict=True)
    )
    report = MaMeReport(layers)
    if any(layer.calls for layer in layers) and not any(layer.merged for layer in layers):
        raise NothingMergedError(nothing_merged([layer for layer in layers if layer.calls]))
    return report


def nothing_merged(called: Sequence[LayerReport]) -> str:
    """One line on layers of which none merged: how many, why, the largest, what to do."""
    counts = Counter(layer.reason for layer in called).most_common()
    reasons = "; ".join(f"{count} of {len(called)}: {reason}" for reason, count in counts[:3])
    line = f"expected at least one layer to merge, but none did ({reasons})"
    if not any(reason.startswith(TOO_FEW) for reason, _ in counts):
        return f"{line}: remove merging, or mend what the reason names"
    largest = max(round(layer.tokens_in) for layer in called)
    return (
        f"{line}, and the largest has {largest} tokens: lower min_tokens, generate larger images,"
        " or remove merging"
    )


def device_of(module: nn.Module) -> torch.device:
    """The device of the module's first parameter, the CPU when it has none."""
    first: Tensor | None = next(iter(module.parameters()), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device
