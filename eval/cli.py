"""The command line, ``mame-sd-eval``: thin commands over the modules beside it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mame_sd import cli as base
from mame_sd.cli_errors import exit_status
from mame_sd.cli_options import MergingOptions, ModelOptions, SamplingOptions, takes
from mame_sd.errors import UserError

app = typer.Typer(
    help="Evaluate merged diffusion models: fidelity to the baseline, quality, cost, and a report.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)
METHODS = ("baseline", "mame", "tomesd")


class MethodOptions(MergingOptions):
    """--method, --ratio and merging's options. `build` gives what `mame_sd.generate.generate` takes."""

    def parameters(self) -> list[inspect.Parameter]:
        method = typer.Option(help="What to run.", metavar="|".join(METHODS), rich_help_panel="Method")
        ratio = typer.Option(help="Share of tokens that tomesd merges. Without it, 0.5.", rich_help_panel="Method")
        kind, none = inspect.Parameter.KEYWORD_ONLY, None
        return [
            inspect.Parameter("method", kind, default="mame", annotation=Annotated[str, method]),
            inspect.Parameter("ratio", kind, default=none, annotation=Annotated[float | None, ratio]),
            *super().parameters(),
        ]

    def build(self, values: Mapping[str, Any]) -> Any:
        method, ratio = values["method"], values["ratio"]
        rest = {name: value for name, value in values.items() if name not in ("method", "ratio")}
        if method not in METHODS:
            raise UserError(f"--method: expected one of {', '.join(METHODS)}, got {method!r}; give one of these")
        unused = [] if method == "mame" else self.given(rest)
        unused += ["--ratio"] if ratio is not None and method != "tomesd" else []
        if unused:
            raise UserError(f"--method {method}: expected no {', '.join(unused)} beside it; drop one of them")
        if method == "tomesd":
            from .methods import ToMeSD

            return ToMeSD(0.5 if ratio is None else ratio)
        return super().build(rest) if method == "mame" else None


@app.command("generate")
@takes(model=base.MODEL, sampling=base.SAMPLING, method=MethodOptions())
def generate_command(
    *,
    out: Annotated[
        Path, typer.Option(help="Run folder: new, empty, or begun by the same command.", metavar="DIR")
    ] = Path("out/generate"),
    prompts: Annotated[
        str | None, typer.Option(help="Prompt file: .txt, .csv, .tsv, .jsonl, or demo.", metavar="FILE")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt. Repeatable, also beside --prompts.", metavar="TEXT")
    ] = None,
    num: Annotated[int | None, typer.Option(help="Take the first NUM prompts only.", metavar="NUM")] = None,
    model: ModelOptions,
    sampling: SamplingOptions,
    method: Any,
) -> None:
    """Generate images as `mame-sd generate` does, also with the methods that merging is compared with."""
    base.generate_run(out, prompts, prompt or [], num, model, sampling, method)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; every failure has become one line on stderr."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    given = list(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: app(given, "mame-sd-eval", standalone_mode=False))


def main() -> None:
    """The console script."""
    sys.exit(run())
