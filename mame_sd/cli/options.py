"""Command-line options that are made from dataclasses: one field, one option, one help text.

A command takes dataclasses as keyword-only parameters; `takes` replaces each by the options of its fields:

    @app.command()
    @takes(run=RunOptions, merging=MERGING)
    def generate(*, run: RunOptions, merging: dict[str, Any]) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from mame_sd.config import CHOICES, SHARES, MaMeConfig
from mame_sd.errors import UserError


class Group(Protocol):
    """Options that together make one argument of a command."""

    def parameters(self) -> list[inspect.Parameter]:
        """One keyword-only parameter an option, annotated for typer."""

    def build(self, values: Mapping[str, Any]) -> Any:
        """The command's argument, of the options' values by parameter name."""


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameters named in `groups` by the options of their groups."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in groups]
        expanded = [*own, *(p for group in groups.values() for p in group.parameters())]

        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            arguments = {name: values[name] for name in (p.name for p in own)}
            for name, group in groups.items():
                arguments[name] = group.build({p.name: values[p.name] for p in group.parameters()})
            command(**arguments)

        with_options.__signature__ = signature.replace(parameters=expanded)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in expanded}
        del with_options.__wrapped__  # typer would look through it
        return with_options

    return decorate


def option(default: Any, help: str, *flags: str, metavar: str | None = None) -> Any:
    """A dataclass field that is an option; its type is the field's annotation."""
    return field(default=default, metadata={"help": help, "flags": flags, "metavar": metavar})


class FieldOptions:
    """The options of a dataclass whose fields were made by `option`, all of them or those of `only`."""

    def __init__(self, kind: type, panel: str, without: Iterable[str] = ()) -> None:
        self._kind = kind
        self._panel = panel
        self._without = set(without)

    def parameters(self) -> list[inspect.Parameter]:
        hints = inspect.get_annotations(self._kind, eval_str=True)
        return [self._parameter(f, hints[f.name]) for f in fields(self._kind) if f.name not in self._without]

    def build(self, values: Mapping[str, Any]) -> Any:
        return self._kind(**values)

    def _parameter(self, f: Field[Any], kind: Any) -> inspect.Parameter:
        made = typer.Option(
            *(f.metadata["flags"] or (flag_of(f.name),)),
            help=f.metadata["help"],
            metavar=f.metadata["metavar"],
            rich_help_panel=self._panel,
        )
        default = f.default if f.default is not MISSING else []
        return inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made]
        )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What to load: the fields of `mame_sd.runs.loading.ModelChoice` as a user gives them."""

    model: str | None = option(
        None,
        "Pipeline folder, hub id (owner/name) or .safetensors file. Without it, the embedded model.",
        metavar="PATH_OR_ID",
    )
    scheduler: str | None = option(
        None,
        "Sampler: ddim, ddpm, deis, dpm++, dpm++-karras, dpm++-sde, euler, euler-a, heun, lcm, pndm, unipc. "
        "Without it, the model's own.",
    )
    dtype: str = option("auto", "float32, float16, bfloat16, or auto: float16 on CUDA, float32 elsewhere.")
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto: the fastest there is.")
    lora: list[str] = field(
        default_factory=list,
        metadata={
            "help": "LoRA to add: file, folder or hub id, with :SCALE at its end if not 1. Repeatable.",
            "flags": (),
            "metavar": "PATH_OR_ID",
        },
    )
    variant: str | None = option(
        None, "Variant of the model's files, such as fp16. (MaMeConfig's variant is --mame-variant.)"
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    offline: bool = option(False, "Never ask the hub; take what is cached.", "--offline")
    single_file_config: str | None = option(
        None, "Pipeline folder or hub id of the same architecture, for a .safetensors file.", metavar="PATH_OR_ID"
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How to sample: the fields of `mame_sd.runs.generate.GenerateSettings` as a user gives them."""

    steps: int = option(20, "Denoising steps, at least 1. More is slower and finer.")
    guidance: float | None = option(None, "Classifier-free guidance scale. Without it, the model's own.")
    seed: int = option(0, "Seed of the run. An image's noise depends on seed, prompt id and repeat alone.")
    height: int | None = option(None, "Height in pixels, a multiple of 8. Without it, the model's own.")
    width: int | None = option(None, "Width in pixels, a multiple of 8. Without it, the model's own.")
    negative_prompt: str | None = option(None, "What to steer away from.")
    batch_size: int = option(1, "Images computed together. Faster on a GPU; pixels depend on it a little.")
    images_per_prompt: int = option(1, "Images of each prompt, from different noise.")


class MergingOptions:
    """One option for each field of MaMeConfig, and --config. `build` gives the config.

    A field whose plain name another option has is called --mame-<field>.
    """

    TAKEN = ("seed", "variant")
    PANEL = "Merging"

    def __init__(self, without: Iterable[str] = ()) -> None:
        self._without = set(without)

    def parameters(self) -> list[inspect.Parameter]:
        made = [self._parameter(f) for f in fields(MaMeConfig) if f.name not in self._without]
        help = "JSON or TOML file of MaMeConfig fields; options given beside it override it."
        file = typer.Option("--config", help=help, metavar="FILE", rich_help_panel=self.PANEL)
        return [*made, _keyword("config", Annotated[Path | None, file])]

    def build(self, values: Mapping[str, Any]) -> MaMeConfig:
        """The config. Raises UserError for a bad value or file."""
        given = {f.name: values.get(_parameter_of(f.name)) for f in fields(MaMeConfig)}
        given = {name: pair(name, v) if name in ("stride", "size") else v for name, v in given.items() if v is not None}
        try:
            base = MaMeConfig.from_file(values["config"]) if values["config"] is not None else MaMeConfig()
            return base.replace(**given)
        except (TypeError, ValueError) as error:
            raise UserError(f"merging: {error}") from None

    def given(self, values: Mapping[str, Any]) -> list[str]:
        """Flags of the options that were given."""
        flags = {_parameter_of(f.name): _merging_flag(f.name) for f in fields(MaMeConfig)}
        return [{**flags, "config": "--config"}[name] for name, value in values.items() if value is not None]

    def _parameter(self, f: Field[Any]) -> inspect.Parameter:
        flag = _merging_flag(f.name)
        numbers = {
            **dict.fromkeys(("tau", "eps", *SHARES), float),
            **dict.fromkeys(("seed", "min_tokens", "tiles"), int),
        }
        kind: Any = numbers.get(f.name, str)
        flags, metavar = (flag,), None
        if f.name in ("refine", "redraw"):
            kind, flags = bool, (f"{flag}/--no-{f.name}",)
        elif f.name in ("stride", "size"):
            metavar = "HxW"
        elif f.name in CHOICES:
            metavar = "|".join(CHOICES[f.name])
        help = f.metadata["help"]
        made = typer.Option(*flags, help=help[:1].upper() + help[1:] + ".", metavar=metavar, rich_help_panel=self.PANEL)
        return _keyword(_parameter_of(f.name), Annotated[kind | None, made])


class OptionalMerging(MergingOptions):
    """As `MergingOptions`, with --baseline: no merging at all, the config is None."""

    def parameters(self) -> list[inspect.Parameter]:
        made = typer.Option("--baseline", help="No merging: the unchanged model.", rich_help_panel=self.PANEL)
        return [_keyword("baseline", Annotated[bool, made], False), *super().parameters()]

    def build(self, values: Mapping[str, Any]) -> Any:
        rest = {name: value for name, value in values.items() if name != "baseline"}
        if not values["baseline"]:
            return super().build(rest)
        given = self.given(rest)
        if given:
            raise UserError(
                f"--baseline: expected no merging options beside it, got {', '.join(given)}; drop one of them"
            )
        return None


def _merging_flag(field_name: str) -> str:
    return flag_of(f"mame_{field_name}" if field_name in MergingOptions.TAKEN else field_name)


def _parameter_of(field_name: str) -> str:
    return f"mame_{field_name}"


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def pair(name: str, text: str) -> tuple[int, int]:
    """`"2x3"` as (2, 3). Raises UserError for anything else."""
    first, _, second = text.lower().replace(",", "x").partition("x")
    try:
        return int(first), int(second)
    except ValueError:
        raise UserError(f"--{name}: expected two whole numbers such as 2x2, got {text!r}; give HEIGHTxWIDTH") from None
