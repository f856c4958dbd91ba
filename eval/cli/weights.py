"""Run ``mame-sd-eval weights``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mame_sd.errors import MachineError, UserError

from ..metric_list import METRICS
from ..weights.load import NAMES, WeightsStatus, get, status
from ..weights.registry import REGISTRY


def get_weights(
    names: Sequence[str], weights_dir: Path | None, on_note: Callable[[str], None]
) -> None:
    """Download weights that this machine lacks.

    Args:
        names: names of networks. If empty, all that metrics use.
        weights_dir: folder of the weights. If None, our own folder.
        on_note: called before each download with a line that names it.

    Raises:
        MachineError: some of them can't be had; the others are there.
    """
    used = {metric.network for metric in METRICS.values()}
    ready = {found.name for found in status(weights_dir) if found.state == "ready"}
    failures = []
    for name in dict.fromkeys(names or [name for name in NAMES if name in used]):
        if name not in ready:
            on_note(f"getting {name}")
            try:
                get(name, weights_dir)
            except (MachineError, UserError) as error:
                failures.append(f"{name}: {error}")
    if failures:
        raise MachineError(
            f"the weights of {len(failures)} networks can't be had: {'; '.join(failures)}"
        )


def weights_lines(weights: Sequence[WeightsStatus]) -> Iterator[str]:
    """Return lines on weights: their state, where they are, where they come from."""
    for found in weights:
        about = REGISTRY[found.name]
        size = f"{about.size / 2**20:.0f} MiB"
        yield f"{found.state:<10}  {found.name:<16}  {size:>8}  {about.licence}"
        yield f"            {found.path or found.how}"
        yield f"            from {about.origin}, sha256 {about.sha256}"
