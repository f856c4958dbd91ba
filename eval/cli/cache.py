"""The body of ``mame-sd-eval cache``: from options to a table."""

from __future__ import annotations

from pathlib import Path

from mame_sd.cli.console import progress
from mame_sd.errors import UserError

from ..json_text import json_text
from .options import CacheOptions


def run_cache_command(out: Path, rows: str | None, form: str, options: CacheOptions) -> str:
    """Measures what `out` does not hold yet, and returns the table, or its figures as JSON.

    Raises:
        UserError: bad options, no model, no texts. What was measured before is kept.
    """
    from ..caches.run import CacheSettings, run_cache
    from ..caches.table import format_table, summary

    settings = CacheSettings(
        model=options.model,
        texts=None if options.texts is None else Path(options.texts),
        half=options.half,
        num=options.num,
        prompts=options.prompts,
        length=options.length,
        rest=options.rest,
        rows=rows,
        shares=_shares(options.shares),
        device=options.device,
        dtype=options.dtype,
        revision=options.revision,
        tasks=tuple(name.strip() for name in options.tasks.split(",") if name.strip()),
        weights_dir=None if options.weights_dir is None else Path(options.weights_dir),
        offline=options.offline,
    )
    with progress("prompts") as on_progress:
        found = summary(run_cache(settings, out, on_progress))
    return json_text(found, indent=1) if form == "json" else format_table(found)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--shares: expected numbers with commas between, got {text!r}") from None
