"""The command line, ``mame-sd``: thin commands over `generate`, `compare`, `show_merge` and `doctor`.

torch and diffusers are imported inside the commands, after cheap checks, so that help and usage errors come at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mame_sd.cli.errors import exit_status
from mame_sd.cli.options import (
    FieldOptions,
    MergingOptions,
    ModelOptions,
    OptionalMerging,
    SamplingOptions,
    pair,
    takes,
)
from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError

if TYPE_CHECKING:
    from mame_sd.cli.doctor import Check
    from mame_sd.runs.loading import LoadedModel
    from mame_sd.runs.methods import Method
    from mame_sd.runs.model_files import ModelChoice

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
MODEL = FieldOptions(ModelOptions, "Model")
SAMPLING = FieldOptions(SamplingOptions, "Sampling")
ONE_IMAGE = FieldOptions(SamplingOptions, "Sampling", without=("batch_size", "images_per_prompt"))
TUNED = FieldOptions(SamplingOptions, "Sampling", without=("batch_size", "images_per_prompt", "height", "width"))
RunFolderOption = Annotated[
    Path, typer.Option(help="Run folder: new, empty, or begun by the same command.", metavar="DIR")
]
PromptFileOption = Annotated[
    str | None, typer.Option(help="Prompt file: .txt, .csv, .tsv, .jsonl, or demo.", metavar="FILE")
]
PromptsOption = Annotated[
    list[str] | None, typer.Option(help="A prompt. Repeatable, also beside --prompts.", metavar="TEXT")
]
NumOption = Annotated[int | None, typer.Option(help="Take the first NUM prompts only.", metavar="NUM")]
PromptArgument = Annotated[str, typer.Argument(help="What to paint.", metavar="PROMPT", show_default=False)]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"mame-sd {version('mame-sd')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Faster diffusion without training: merge tokens before self-attention (MaMe), restore them after it (MaRe)."""


@app.command("generate")
@takes(model=MODEL, sampling=SAMPLING, merging=OptionalMerging())
def generate_command(
    *,
    out: RunFolderOption = Path("out/generate"),
    prompts: PromptFileOption = None,
    prompt: PromptsOption = None,
    num: NumOption = None,
    model: ModelOptions,
    sampling: SamplingOptions,
    merging: MaMeConfig | None,
) -> None:
    """Generate images from prompts, with merging on. Run again to continue; launch with accelerate to share out."""
    generate_run(out, prompts, prompt or [], num, model, sampling, merging)


@app.command("compare")
@takes(model=MODEL, sampling=ONE_IMAGE, merging=MergingOptions(without=("tau", "keep")))
def compare_command(
    *,
    prompt: PromptArgument,
    tau: Annotated[str | None, typer.Option(help="Taus to show, with commas between.")] = None,
    keep: Annotated[
        str | None, typer.Option(help="Shares to keep to show, with commas between. 0.5,0.25,0.125 without --tau.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The sheet, a .png file.", metavar="FILE")] = Path("compare.png"),
    model: ModelOptions,
    sampling: SamplingOptions,
    merging: MaMeConfig,
) -> None:
    """Write one labelled sheet: the baseline, then each setting, with seconds and tokens kept."""
    from mame_sd.cli.compare import compare, compare_sheet, variants_of
    from mame_sd.cli.sheet import check_sheet_path, write_sheet
    from mame_sd.runs.jobs import GenerateSettings
    from mame_sd.runs.loading import load_model

    settings = GenerateSettings(**asdict(sampling))
    neither = tau is None and keep is None
    taus = _numbers("--tau", "0.6,0.7,0.8,0.9" if neither and merging.tau is not None else tau)
    keeps = _numbers("--keep", "0.5,0.25,0.125" if neither and merging.tau is None else keep)
    variants_of(merging, taus, keeps)  # refuses bad numbers before anything is loaded
    check_sheet_path(out)
    loaded = load_model(model_choice(model))
    variants = variants_of(_with_saved(loaded, merging, needed=True), taus, keeps)
    with progress("images") as on_progress:
        panels = compare(loaded, prompt, settings, variants, on_progress)
    about = [{"label": p.label, "seconds": p.seconds, "levels": p.levels} for p in panels]
    write_sheet(out, compare_sheet(prompt, panels), {"prompt": prompt, "model": loaded.identity, "panels": about})
    for panel in panels:
        print("  ".join(panel.lines(panels[0])))
    print(out)


@app.command("show-merge")
@takes(model=MODEL, sampling=ONE_IMAGE, merging=MergingOptions())
def show_merge_command(
    *,
    prompt: PromptArgument,
    step: Annotated[int, typer.Option(help="Denoising step to draw, from 1.")] = 1,
    level: Annotated[int, typer.Option(help="Attention level to draw; 0 has the most tokens.")] = 0,
    layer: Annotated[str | None, typer.Option(help="A layer's name, or a part of it, instead of --level.")] = None,
    out: Annotated[Path, typer.Option(help="The drawing, a .png file.", metavar="FILE")] = Path("show-merge.png"),
    model: ModelOptions,
    sampling: SamplingOptions,
    merging: MaMeConfig,
) -> None:
    """Draw which tokens were merged into which, over the image, for one level and step."""
    from mame_sd.cli.sheet import check_sheet_path, write_sheet
    from mame_sd.cli.show_merge import capture_merge, draw_merge
    from mame_sd.runs.jobs import GenerateSettings
    from mame_sd.runs.loading import load_model

    settings = GenerateSettings(**asdict(sampling))
    check_sheet_path(out)
    loaded = load_model(model_choice(model))
    merging = _with_saved(loaded, merging, needed=True)
    found = capture_merge(loaded, prompt, settings, merging, step, level, layer)
    about = {"prompt": prompt, "model": loaded.identity, "mame": merging.to_dict(), "layer": found.layer, "step": step}
    write_sheet(out, draw_merge(found, prompt), about)
    print(f"{found.layer}, step {step}: {found.tokens_kept} of {found.owners.size} tokens kept")
    print(out)


@app.command("tune")
@takes(model=MODEL, sampling=TUNED, merging=MergingOptions(without=("tau", "keep", "stride", "tiles", "merge", "size")))
def tune_command(
    *,
    max_lpips: Annotated[
        float | None, typer.Option(help="Choose the fastest setting whose mean LPIPS is at most this.")
    ] = None,
    min_speedup: Annotated[
        float | None, typer.Option(help="Choose the setting of least LPIPS that is at least this many times faster.")
    ] = None,
    pixels: Annotated[
        str | None, typer.Option("--size", help="Image size in pixels. Without it, the model's own.", metavar="S|HxW")
    ] = None,
    prompts: PromptFileOption = None,
    prompt: PromptsOption = None,
    num: NumOption = None,
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of LPIPS weights.", metavar="DIR")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for config.json and the measurements; run again to continue.", metavar="DIR")
    ] = Path("out/tune"),
    model: ModelOptions,
    sampling: SamplingOptions,
    merging: MaMeConfig,
) -> None:
    """Find the setting for your model, size and machine; write it as a file that --config takes."""
    from mame_sd.cli.tune import choose, ladder_of, lpips_distance, table, text_plot, tune, whole
    from mame_sd.runs.jobs import GenerateSettings
    from mame_sd.runs.loading import load_model
    from mame_sd.runs.run_folder import write_atomically

    if (max_lpips is None) == (min_speedup is None):
        raise UserError("expected --max-lpips or --min-speedup, one of them; say what matters")
    height, width = (None, None) if pixels is None else pair("size", pixels if "x" in pixels else f"{pixels}x{pixels}")
    settings = GenerateSettings(**{**asdict(sampling), "height": height, "width": width})
    ladder_of(merging)  # refuses what allows no keep before anything is loaded
    texts = list(prompt or [])
    num = 4 if num is None and not texts else num
    chosen_prompts = read_prompts(prompts or (None if texts else "demo"), texts, num)
    distance = lpips_distance(weights_dir, model.offline)
    loaded = load_model(model_choice(model))
    ladder = ladder_of(_with_saved(loaded, merging, needed=True))
    with progress("images") as on_progress:
        trials = tune(loaded, chosen_prompts, settings, ladder, distance, out, on_progress)
    try:
        best = choose(trials, max_lpips, min_speedup)
    except UserError:
        print(table(trials, None))
        raise
    print(table(trials, best), text_plot(trials), sep="\n\n", end="\n\n")
    file = out / "config.json"
    write_atomically(file, (json.dumps(whole(best.config), indent=1) + "\n").encode())
    print(f"{file}: mame-sd generate --config {file}, or MaMeConfig.from_file({str(file)!r})")


@app.command("sheet")
def sheet_command(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, such as a baseline and a merged one.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The sheet, a .png file.", metavar="FILE")] = Path("sheet.png"),
    num: Annotated[int, typer.Option(help="Show the first NUM images.", metavar="NUM")] = 12,
) -> None:
    """Write one sheet of finished runs: the same images, run below run."""
    from mame_sd.cli.compare import folders_sheet
    from mame_sd.cli.sheet import check_sheet_path, write_sheet

    if num < 1:
        raise UserError(f"--num: expected at least 1, got {num}; raise it")
    check_sheet_path(out)
    write_sheet(out, folders_sheet(folders, num), {"folders": [folder.name for folder in folders]})
    print(out)


@app.command("ui")
@takes(model=MODEL, merging=MergingOptions(without=("tau", "keep")))
def ui_command(
    *,
    prompt: Annotated[str, typer.Option(help="What stands in the prompt's field at first.", metavar="TEXT")] = (
        "rocket on a light blue background"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on, 0 to 65535; 0 takes a free one.", metavar="PORT")
    ] = 7860,
    model: ModelOptions,
    merging: MaMeConfig,
) -> None:
    """Serve a page that paints with and without merging, side by side. Ctrl-C ends it. Needs the package gradio."""
    from mame_sd.cli.ui import Painter, load_gradio, serve
    from mame_sd.runs.loading import load_model

    if not 0 <= port <= 65535:
        raise UserError(f"--port: expected a number from 0 to 65535, got {port}; give another")
    load_gradio()
    loaded = load_model(model_choice(model))
    painter = Painter(loaded, _with_saved(loaded, merging, needed=True))
    painter.warm_up()
    page = serve(painter, host, port, prompt)
    print(f"{page.local_url} (Ctrl-C ends it)", flush=True)
    page.block_thread()


@app.command("doctor")
@takes(model=MODEL)
def doctor_command(*, model: ModelOptions) -> None:
    """Say what this machine can do: versions, device, fused attention, the model, and what would fail."""
    from mame_sd.cli.doctor import examine

    print_checks(examine(model_choice(model)))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; every failure has become one line on stderr."""
    return exit_status(lambda: invoke(arguments))


def invoke(arguments: Sequence[str] | None = None) -> Any:
    """Run one command line (that of the process by default), failures as exceptions."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its import-time notices are not about our users' input
    return app(list(sys.argv[1:] if arguments is None else arguments), "mame-sd", standalone_mode=False)


def generate_run(
    out: Path,
    prompts: str | None,
    texts: Sequence[str],
    num: int | None,
    model: ModelOptions,
    sampling: SamplingOptions,
    method: MaMeConfig | Method | None,
) -> None:
    """The body of ``generate``: load the model, make what `out` lacks, and print how it went."""
    from mame_sd.runs.generate import generate
    from mame_sd.runs.jobs import GenerateSettings
    from mame_sd.runs.loading import load_model
    from mame_sd.runs.processes import joined, this_process
    from mame_sd.runs.prompt_files import prompt_file_identity
    from mame_sd.runs.run_folder import RunFolder

    settings = GenerateSettings(**asdict(sampling))
    chosen = read_prompts(prompts, texts, num)
    prompt_file = None if prompts is None else prompt_file_identity(prompts)
    RunFolder(out).check()
    process = this_process()
    loaded = load_model(model_choice(model, process.local_rank))
    if isinstance(method, MaMeConfig):
        method = _with_saved(loaded, method, told=process.is_main)
    with joined(process), progress("images", process.is_main) as on_progress:
        summary = generate(
            loaded,
            chosen,
            settings,
            method,
            out,
            prompt_file=prompt_file,
            process=process,
            on_progress=on_progress,
            on_note=note,
        )
    if process.is_main:
        seconds = summary.seconds_per_image
        print(f"{summary.images} images in {out}" + (f", {seconds:.2f} s per image" if seconds is not None else ""))
        _print_levels(summary.levels, method)


def model_choice(model: ModelOptions, local_rank: int = 0) -> ModelChoice:
    from mame_sd.runs.model_files import ModelChoice
    from mame_sd.runs.schedulers import check_scheduler

    check_scheduler(model.scheduler)
    fields: dict[str, Any] = {name: value for name, value in vars(model).items() if name != "lora"}
    return ModelChoice(**fields, loras=tuple(model.lora), local_rank=local_rank)


def _with_saved(loaded: LoadedModel, given: MaMeConfig, told: bool = True, needed: bool = False) -> Any:
    """The settings in force: those saved with the model, where there are some, under the fields of `given`.

    None when they say that merging is off and nothing was given, unless merging is `needed`.
    """
    saved = loaded.saved_merging
    if saved is None:
        return given
    if told:
        note(f"merging as saved with the model ({saved}); options such as --tau, --keep and --baseline override it")
    if not (saved.on or needed or given.given):
        return None
    try:
        return saved.overridden(given)
    except ValueError as error:
        raise UserError(f"merging: {error} (the model was saved with {saved})") from None


def print_checks(checks: Sequence[Check]) -> None:
    """One line a check on stdout. Raises UserError or MachineError when one failed."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.state:<4}  {check.name:<{width}}  {check.detail}")
    for check in checks:
        if check.bad_input:
            raise UserError(check.detail)
    failed = [check.name for check in checks if check.state == "fail"]
    if failed:
        raise MachineError(f"expected every check to pass, failed: {', '.join(failed)}; the lines above say what to do")


def read_prompts(file: str | None, texts: Sequence[str], num: int | None) -> Any:
    from mame_sd.runs.prompt_files import load_prompts, prompts_from_texts

    if num is not None and num < 1:
        raise UserError(f"--num: expected at least 1, got {num}; raise it, or leave it out for all")
    if file is None and not texts:
        raise UserError("expected prompts, got none; give --prompts FILE (or demo), or --prompt TEXT")
    chosen = [] if file is None else load_prompts(file)
    return [*chosen, *prompts_from_texts(texts)][:num]


def _numbers(flag: str, text: str | None) -> list[float]:
    """`"0.6,0.7"` as numbers; none for None."""
    try:
        return [] if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"{flag}: expected numbers with commas between, such as 0.6,0.8, got {text!r}; correct it"
        ) from None


@contextmanager
def progress(unit: str, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with images per second and time left; gives a callback for (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task(unit, total=None, rate="")

        def update(done: int, total: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{done / elapsed:.2f} {unit}/s" if done and elapsed else ""
            bar.update(task, completed=done, total=total, rate=rate)

        yield update


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _print_levels(levels: Sequence[dict[str, Any]], method: MaMeConfig | Method | None) -> None:
    what = "keys" if isinstance(method, MaMeConfig) and method.merge == "kv" else "tokens"
    for level in levels:
        kept, count = level["tokens_kept"], level["tokens_in"]
        print(f"level {level['level']}: {kept:.0f} of {count:.0f} {what} kept ({kept / count:.0%})")
