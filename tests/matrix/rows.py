"""Define a row of the compatibility matrix, and check it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import diffusers
import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from mame_sd import MaMeAttnProcessor, MaMeConfig, MaMeHandle, apply_mame, remove_mame
from mame_sd.diffusion.denoisers import denoiser_of

Processor = Literal["", "same", "replaced", "reset", "error"]
Shapes = dict[nn.Module, list[Any]]


def nothing(subject: Any) -> None:
    """Switch nothing on, for rows whose feature is the pipeline itself."""


def param(value: Any, sweep: bool = False, since: str = "0") -> Any:
    """Return a parameter of a test, skipped with an older diffusers or without `--sweep`."""
    name = getattr(value, "name", value)
    old = Version(diffusers.__version__) < Version(since)
    marks = [pytest.mark.skipif(old, reason=f"needs diffusers {since}")]
    marks += [pytest.mark.matrix] if sweep else []
    return pytest.param(value, id=name, marks=marks)


@dataclass(frozen=True)
class Row:
    """One pipeline, or one feature on a pipeline, and what merging is to do there.

    Attributes:
        name: as in the table.
        build: a pipeline or model that was never touched, the same each time.
        run: one call of it, seeded; the images or the model's output.
        merges: how many layers merge, by their number of tokens.
        switch: turns the feature on; must work before `apply_mame` and after it, with the same
            result.
        undo: turns it off again; merging must go on as if it had never been on.
        target: what `apply_mame` is given, when that is not the pipeline or model itself.
        loads: checks that `from_pretrained` gives back what `save_pretrained` was given while it
            merged; six rows do.
        exact: output after a switch in either order, and after undoing it, is bit-equal; else equal
            to rounding.
        modes: settings to merge by; each keeps half of the tokens.
        processor: what becomes of `set_attn_processor(MaMeAttnProcessor(...))`: "" is not checked;
            "same" as `apply_mame`; "replaced" by the feature, silently; "reset" to default settings
            by it; "error" that tells to use `apply_mame`.
        one_liner: the table's words if `processor` is "".
        since: the first version of diffusers in which this works here without our code.
        sweep: `make test` leaves it out, because another row runs the same code.
    """

    name: str
    build: Callable[[], Any]
    run: Callable[[Any], Tensor]
    merges: Mapping[int, int]
    switch: Callable[[Any], Any] = nothing
    undo: Callable[[Any], Any] | None = None
    target: Callable[[Any], Any] = lambda subject: subject
    loads: bool = False
    exact: bool = True
    modes: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"keep": {"keep": 0.5}, "tau": {"tau": -1.0}}
    )
    min_tokens: int = 60
    processor: Processor = ""
    one_liner: str = ""
    since: str = "0"
    sweep: bool = False


@contextmanager
def recorded(subject: Any) -> Iterator[Shapes]:
    """Record the shapes of all tensors that each module is called with, in order."""
    shapes: Shapes = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        shapes.setdefault(module, []).append([tuple(t.shape) for t in tensors])

    parts = [subject] if isinstance(subject, nn.Module) else subject.components.values()
    with ExitStack() as stack:
        for module in {m for part in parts if isinstance(part, nn.Module) for m in part.modules()}:
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield shapes


def first_mode(row: Row) -> tuple[str, Mapping[str, Any]]:
    """Return the mode that is used for checks in one mode only."""
    return next(iter(row.modes.items()))


def check_merges(handle: MaMeHandle, row: Row) -> None:
    """Check that the row's layers merged, and that each kept half of its tokens."""
    layers = [layer for layer in handle.report().layers if layer.merged]
    assert Counter(round(layer.tokens_in) for layer in layers) == Counter(row.merges), str(
        handle.report()
    )
    for layer in layers:
        assert layer.tokens_kept == pytest.approx(layer.tokens_in / 2, abs=0.5), str(
            handle.report()
        )


def check_row(row: Row, folder: Path) -> None:
    """Everything that a row promises; asserts."""
    subject = row.build()
    row.switch(subject)
    with recorded(subject) as before:
        baseline = row.run(subject)
    target = row.target(subject)
    outputs = {}
    for mode, fields in row.modes.items():
        handle = apply_mame(target, min_tokens=row.min_tokens, **fields)
        with recorded(subject) as after:
            outputs[mode] = row.run(subject)
        check_merges(handle, row)
        assert not torch.equal(outputs[mode], baseline), f"{mode}: merging changed nothing"
        assert outputs[mode].isfinite().all()
        changed = {m for m in before.keys() | after.keys() if before.get(m) != after.get(m)}
        merged = [layer.name for layer in handle.report().layers if layer.merged]
        strays = changed.difference(*(handle.root.get_submodule(name).modules() for name in merged))
        assert not strays, f"{mode}: other inputs in {[type(module).__name__ for module in strays]}"
    if row.switch is nothing:
        apply_mame(target, tau=1.0, min_tokens=row.min_tokens)
        torch.testing.assert_close(
            row.run(subject), baseline, rtol=1e-4, atol=1e-4, msg="tau=1 is not the baseline"
        )
    remove_mame(target)
    assert torch.equal(row.run(subject), baseline), "removal is not bit-exact"
    if row.switch is not nothing:
        check_order(row, outputs)
    if row.loads:
        check_saving(row, folder, baseline, outputs)
    check_one_liner(row)


def check_order(row: Row, outputs: dict[str, Tensor]) -> None:
    """Check that a feature may come on after `apply_mame`, and goes without a trace."""
    mode, fields = first_mode(row)
    subject = row.build()
    handle = apply_mame(row.target(subject), min_tokens=row.min_tokens, **fields)
    plain = row.run(subject)
    row.switch(subject)
    handle.reset()
    same(row, row.run(subject), outputs[mode], f"{mode}: switched on after apply_mame")
    check_merges(handle, row)
    if row.undo is not None:
        row.undo(subject)
        same(row, row.run(subject), plain, f"{mode}: switched off again")


def check_saving(row: Row, folder: Path, baseline: Tensor, outputs: dict[str, Tensor]) -> None:
    """Check that a model saved while it merged loads without merging, and merges as before."""
    subject = row.build()
    mode, fields = first_mode(row)
    apply_mame(row.target(subject), min_tokens=row.min_tokens, **fields)
    subject.save_pretrained(folder)
    loaded = type(subject).from_pretrained(folder)
    if hasattr(loaded, "set_progress_bar_config"):
        loaded.set_progress_bar_config(disable=True)
    row.switch(loaded)
    assert torch.equal(row.run(loaded), baseline), "saving and loading changed the output"
    apply_mame(row.target(loaded), min_tokens=row.min_tokens, **fields)
    assert torch.equal(row.run(loaded), outputs[mode])


def check_one_liner(row: Row) -> None:
    """Check what `set_attn_processor(MaMeAttnProcessor(...))` does, as the row says.

    The processor sees neither steps nor latents.
    """
    if not row.processor:
        return
    mode, fields = first_mode(row)
    subject = row.build()
    model = denoiser_of(row.target(subject))
    processor = MaMeAttnProcessor(min_tokens=row.min_tokens, **fields)
    if row.processor == "error":
        row.switch(subject)
        model.set_attn_processor(processor)
        with pytest.raises(ValueError, match="apply_mame"):
            row.run(subject)
        return
    model.set_attn_processor(processor)
    row.switch(subject)
    output = row.run(subject)
    left = [p for p in model.attn_processors.values() if isinstance(p, MaMeAttnProcessor)]
    if row.processor == "replaced":
        assert not left, "the one-liner survived"
    elif row.processor == "reset":
        assert left, "the one-liner was replaced"
        assert all(p.config == MaMeConfig() for p in left), "the one-liner kept its settings"
    else:
        hooked = row.build()
        apply_mame(
            row.target(hooked),
            min_tokens=row.min_tokens,
            **{"redraw": False, "share_guidance_plan": False, **fields},
        )
        row.switch(hooked)
        same(row, output, row.run(hooked), f"{mode}: the one-liner")


def same(row: Row, got: Tensor, expected: Tensor, what: str) -> None:
    """Bit-equal, or to rounding where the row says so."""
    if row.exact:
        assert torch.equal(got, expected), f"{what}: not bit-equal"
    else:
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, msg=what)
