"""Where a model's files are: which folder or file a name means, hub downloads, a digest that tells
models apart.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from mame_sd.config import SETTINGS_FILE
from mame_sd.errors import UserError, first_line
from mame_sd.runs.files import shown
from mame_sd.runs.options import option
from mame_sd.runs.schedulers import check_scheduler

EMBEDDED = "embedded-"  # what the name of an embedded model begins with, as --model takes it
DTYPES = ("float32", "float16", "bfloat16")

# owner/name, neither part hidden, and no file
HUB_ID = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+(?<!\.safetensors)")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What to load and how; each field's help text says what it means.

    Raises:
        UserError: a scheduler or dtype that there is none of.
    """

    model: str | None = option(
        None,
        "Folder, hub id, .safetensors file or embedded-NAME to load. Default: embedded-unet.",
        metavar="PATH_OR_ID",
    )
    scheduler: str | None = option(
        None,
        "Sampler to use instead of the model's own; an unknown name lists them.",
        metavar="NAME",
    )
    dtype: str = option(
        "auto", f"{', '.join(DTYPES)}, or auto: float16 on CUDA, float32 elsewhere."
    )
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto: the fastest there is.")
    loras: tuple[str, ...] = option(
        (),
        "LoRA to add: file, folder or hub id, with :SCALE at its end if not 1. Repeatable.",
        "--lora",
        metavar="PATH_OR_ID",
    )
    variant: str | None = option(None, "Variant of the model's files, such as fp16.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    offline: bool = option(False, "Never ask the hub; take what is cached.")
    single_file_config: str | None = option(
        None,
        "Pipeline folder or hub id of the same architecture, for a .safetensors file.",
        metavar="PATH_OR_ID",
    )

    @property
    def embedded(self) -> str | None:
        """Name of the embedded model that is meant, by no `model` ("unet") or by embedded-NAME;
        None: another model.

        A folder or file of that name goes before an embedded model.
        """
        if self.model is None:
            return "unet"
        named = self.model.startswith(EMBEDDED) and not os.path.exists(self.model)
        return self.model.removeprefix(EMBEDDED) if named else None

    def __post_init__(self) -> None:
        check_scheduler(self.scheduler)
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(
                f"--dtype: expected auto, {', '.join(DTYPES)}, got {self.dtype!r}; give one of"
                " these"
            )


def find_model(choice: ModelChoice) -> tuple[Path, str]:
    """The file or folder that `choice.model` means, downloaded if need be, and a name for it
    without its place.

    Raises UserError when there is none.
    """
    if choice.embedded is not None:
        from mame_sd.embedded.model import embedded_model_path

        name = EMBEDDED + choice.embedded
        try:
            folder = embedded_model_path(choice.embedded)
        except FileNotFoundError as error:
            raise UserError(f"--model {name}: {error}") from None
        return _pipeline_folder(folder), "embedded" if choice.embedded == "unet" else name
    name = choice.model or ""
    path = Path(name)
    if os.path.isdir(
        path
    ):  # unlike Path.is_dir, False also for names that are too long or out of reach
        return _pipeline_folder(path), shown(path.resolve().name)
    if os.path.isfile(path):
        if path.suffix.lower() != ".safetensors":
            raise UserError(
                f"--model {path}: expected a folder, a hub id or a .safetensors file, got another"
                " file; convert it"
            )
        return path, shown(path.name)
    if not HUB_ID.fullmatch(name):
        raise UserError(
            f"--model {name}: expected a folder, a .safetensors file or a hub id (owner/name), "
            "found no such file; check the path"
        )
    return _download(choice), name


def _pipeline_folder(path: Path) -> Path:
    if not os.path.isfile(path / "model_index.json"):
        raise UserError(
            f"--model {path}: expected the folder of a diffusers pipeline, got one without"
            " model_index.json; give the folder that holds it"
        )
    return path


def _download(choice: ModelChoice) -> Path:
    """The cached snapshot of a hub model, fetched when it is not there yet."""
    from diffusers import DiffusionPipeline

    try:
        folder = DiffusionPipeline.download(
            choice.model,
            variant=choice.variant,
            revision=choice.revision,
            local_files_only=choice.offline,
        )
    except (
        Exception
    ) as error:  # offline, unknown id, gated, no such revision: all mean that it can't be had
        reason = first_line(error).partition(" (")[0]
        raise UserError(
            f"--model {choice.model}: expected a folder, a .safetensors file, or a model of the hub"
            f" that can be reached or is cached, but {reason}; check the name and the network, or"
            " give a folder"
        ) from error
    return Path(folder)


def digest_of(source: Path) -> str:
    """A digest of names, sizes and whole contents of the files that decide pixels: no hidden files,
    model cards or Python's files.

    Nor settings of merging, which a run tells by themselves.
    """
    digest = hashlib.sha256()
    files = (
        [source]
        if source.is_file()
        else sorted(
            p
            for p in source.rglob("*")
            if p.is_file() and p.suffix not in (".md", ".py", ".pyc") and p.name != SETTINGS_FILE
        )
    )
    for path in files:
        if any(part.startswith(".") for part in path.relative_to(source).parts):
            continue
        size = path.stat().st_size
        name = path.name if path == source else path.relative_to(source).as_posix()
        digest.update(f"{name}\0{size}\0".encode())
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def name_and_digest(source: str) -> dict[str, str | None]:
    """JSON values for a path or a hub id: a name without its place, and a digest of what lies there
    (None: a hub id).
    """
    path = Path(source)
    return (
        {"name": shown(path.resolve().name), "sha256": digest_of(path)}
        if os.path.exists(path)
        else {"name": source, "sha256": None}
    )
