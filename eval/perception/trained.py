"""The suite `trained`: one vision transformer trained without merging and with it, several seeds of
each.

Answers of all seeds stand one after the other, as if each picture were there once a seed; shares
are taken seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..benchmark.tomesd import NotApplicable
from ..metric_list import Metric, quality
from ..results.schema import Value
from ..stats import seed_interval
from .answers import Batches, answers_of
from .columns import COLUMNS
from .forms import TrainedModels
from .heads import Head
from .methods import Method
from .rows import BASELINE, Row
from .run import UNLABELLED, Classification, settings_of

_OVER = "Mean over seeds with Student's 95 % interval over trainings, all on the same pictures."
_GAIN = (
    f"Top-1 minus that of the unmerged model of the same seed. {_OVER} An interval above 0 is"
    " better than no merging."
)
_OWN = {
    "agreement": replace(
        COLUMNS["agreement"],
        about=f"Share of images whose answer is the unmerged model's of that seed. {_OVER}",
    ),
    "top1": replace(COLUMNS["top1"], about=f"Share of images whose answer is their label. {_OVER}"),
    "gain": quality("gain", "Gain", "image", _GAIN, unit="points", digits=2),
}


@dataclass(kw_only=True)
class Trained(Classification):
    """`Classification` of models that were trained in several forms.

    `head` is the unmerged model of the first seed.

    Attributes:
        models: where they lie.
        load: the head of a form and seed.
    """

    models: TrainedModels
    load: Callable[[str, int], Head]

    @property
    def columns(self) -> dict[str, Metric]:
        return {**super().columns, **_OWN}

    @property
    def labels(self) -> Sequence[int] | None:
        own = super().labels
        return None if own is None else [*own] * len(self.models.seeds)

    def _batches(
        self, row: Row, method: Method, on_progress: Callable[[int, int], object]
    ) -> Batches:
        if row.weights not in self.models.forms:
            raise NotApplicable(
                f"expected models of the form {row.weights!r}, found none; train them first"
            )
        found: Batches = {}
        count, total = len(self.images.files), len(self.images.files) * len(self.models.seeds)
        for place, seed in enumerate(self.models.seeds):
            batches = answers_of(
                self.load(row.weights, seed),
                method,
                self.images,
                self.size,
                self.out / "answers" / f"{row.name}-{seed}.jsonl",
                {
                    **settings_of(self.results.manifest),
                    "method": method.describe(),
                    "weights": [row.weights, seed],
                },
                self.process,
                lambda done, _, before=place * count: on_progress(before + done, total),  # type: ignore[misc]
            )
            found.update(
                {place * len(batches) + number: batch for number, batch in batches.items()}
            )
        return found

    def _share(self, flags: Sequence[bool]) -> Value:
        shares = self._by_seed(flags)
        value = seed_interval(shares)
        if len(shares) > 1:
            value.update(low=max(0.0, value["low"]), high=min(100.0, value["high"]))
        return Value(**value, seeds=shares)

    def _top1(self, name: str, found: Mapping[str, Batches]) -> Value:
        right = self._right(found[name])
        return self._share(right) if right is not None else super()._top1(name, found)

    def _compare(self, found: Mapping[str, Batches]) -> None:
        """How much better each row is than the unmerged model of the same seed."""
        for name in found:
            self.results.row(name).values["gain"] = self._gain(name, found)
        self._save()

    def _gain(self, name: str, found: Mapping[str, Batches]) -> Value:
        right, plain = self._right(found[name]), self._right(found[BASELINE])
        if right is None or plain is None:
            return UNLABELLED
        if name == BASELINE:
            return Value(withheld="the unmerged model itself")
        pairs = zip(self._by_seed(right), self._by_seed(plain), strict=True)
        gains = [ours - theirs for ours, theirs in pairs]
        return Value(**seed_interval(gains), seeds=gains)

    def _by_seed(self, flags: Sequence[bool]) -> list[float]:
        """The share of each seed, in per cent."""
        count = len(flags) // len(self.models.seeds)
        return [
            100 * sum(flags[start : start + count]) / count for start in range(0, len(flags), count)
        ]
