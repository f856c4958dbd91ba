"""Find a model's files by name, download them, and compute digests that distinguish models."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mame_sd.config import SETTINGS_FILE
from mame_sd.errors import UserError, first_line, unexpected
from mame_sd.runs.files import files_below, shown
from mame_sd.runs.options import option

EMBEDDED = "embedded-"  # prefix of the names of embedded models
FEW_STEPS = "few-steps"  # the embedded LoRA, for the embedded transformer
DTYPES = ("float32", "float16", "bfloat16")
HUB_ID = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+(?<!\.safetensors)")  # owner/name, and no file


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model to load, and how; each field's help text describes it.

    Raises:
        UserError: an unknown dtype, a revision of no hub model, a configuration without a file.
    """

    model: str | None = option(
        None,
        "Folder, hub id, .safetensors file or embedded-NAME to load. Default: embedded-unet.",
        metavar="PATH_OR_ID",
    )
    scheduler: str | None = option(
        None,
        "Scheduler class instead of the model's own; an unknown name lists those that fit.",
        metavar="NAME",
    )
    dtype: str = option(
        "auto", f"{', '.join(DTYPES)}, or auto: float16 on CUDA, float32 elsewhere."
    )
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto: the fastest available.")
    loras: tuple[str, ...] = option(
        (),
        "LoRA to add: file, folder, hub id or embedded-few-steps, optionally followed by :SCALE."
        " Repeatable.",
        "--lora",
        metavar="PATH_OR_ID",
    )
    variant: str | None = option(None, "Variant of the model's files, such as fp16.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    offline: bool = option(False, "Never contact the hub; use only cached files.")
    single_file_config: str | None = option(
        None,
        "For a .safetensors file: a pipeline's folder or hub id of the same architecture.",
        metavar="PATH_OR_ID",
    )

    @property
    def name(self) -> str:
        """Return the name of the model's file or folder without the path, or the model as given."""
        return "embedded" if self.embedded == "unet" else name_of(self.model or "")

    @property
    def embedded(self) -> str | None:
        """Return the name of the embedded model, or None for another model.

        A folder or file of the same name has priority.
        """
        if self.model is None:
            return "unet"
        named = self.model.startswith(EMBEDDED) and not os.path.exists(self.model)
        return self.model.removeprefix(EMBEDDED) if named else None

    def check_place(self) -> None:
        """Raise UserError if the model of a pipeline or a LoRA can't be what the name says.

        It imports no large library and doesn't contact the hub.
        """
        if self.embedded is not None or not HUB_ID.fullmatch(self.model or ""):
            find_model(self)
        for lora in self.loras:
            read_lora(lora)

    def identity(self) -> dict[str, Any]:
        """Return the part of the model's identity that needs neither torch nor the model.

        Raises:
            UserError: a LoRA is not there.
        """
        config, chosen = self.single_file_config, {"scheduler": self.scheduler, "dtype": self.dtype}
        return {
            "name": self.name,
            "variant": self.variant,
            "single_file_config": None if config is None else name_and_digest(config),
            "loras": [
                {**name_and_digest(source), "scale": scale}
                for source, scale in map(read_lora, self.loras)
            ],
            **{name: value for name, value in chosen.items() if value not in (None, "auto")},
        }

    def __post_init__(self) -> None:
        model = self.model or "none"
        if self.model == "":
            raise unexpected("--model", "a folder, file or hub id", "nothing", "give one")
        if self.dtype not in ("auto", *DTYPES):
            allowed = f"auto, {', '.join(DTYPES)}"
            raise unexpected("--dtype", allowed, repr(self.dtype), "give one of these")
        if self.revision is not None and (self.embedded or os.path.exists(model)):
            raise unexpected("--revision", "a hub id as --model", model, "leave it out")
        if self.single_file_config is not None and Path(model).suffix != ".safetensors":
            allowed = "a .safetensors file as --model"
            raise unexpected("--single-file-config", allowed, model, "leave it out")


def read_lora(lora: str) -> tuple[str, float]:
    """Return the file, folder or hub id of PATH_OR_ID[:SCALE], and its scale.

    Raises:
        UserError: the scale is no finite number, or nothing is at the path.
    """
    source, mark, text = lora.rpartition(":")
    try:
        scale = float(text)
    except ValueError:
        mark = ""
    if not mark or os.path.exists(lora):
        source, scale = lora, 1.0
    if not math.isfinite(scale):
        allowed = "a finite scale after the colon"
        raise unexpected(f"--lora {lora}", allowed, text, "give one such as 0.8")
    if source == EMBEDDED + FEW_STEPS and not os.path.exists(source):
        from mame_sd.embedded.model import GET_THEM, models_folder

        source = str(models_folder() / FEW_STEPS.replace("-", "_"))
        if not os.path.exists(source):
            raise UserError(f"--lora {lora}: expected the embedded LoRA, found none; {GET_THEM}")
    if not os.path.exists(source) and not HUB_ID.fullmatch(source):
        raise UserError(
            f"--lora {source}: expected a .safetensors file, a folder or a hub id, found nothing;"
            " check the path"
        )
    return source, scale


def find_model(choice: ModelChoice) -> Path:
    """Return the pipeline's folder or file, downloaded if it must be, or raise UserError."""
    file = Path(choice.model or "")
    if os.path.isfile(file):
        if file.suffix != ".safetensors":
            allowed = "a folder, a hub id or a .safetensors file"
            raise unexpected(f"--model {file}", allowed, "another file", "convert it")
        return file

    def download(name: str) -> str:
        from diffusers import DiffusionPipeline

        version = {"variant": choice.variant, "revision": choice.revision}
        return str(DiffusionPipeline.download(name, **version, local_files_only=choice.offline))

    folder = find_folder(choice.model or f"{EMBEDDED}unet", download)
    if not os.path.isfile(folder / "model_index.json"):
        raise unexpected(
            f"--model {choice.model or folder}",
            "the folder of a diffusers pipeline",
            "one without model_index.json",
            "give the folder that contains it",
        )
    return folder


def find_folder(name: str, download: Callable[[str], str], flag: str = "--model") -> Path:
    """Return the folder of a model, or raise UserError.

    Args:
        name: a folder, embedded-NAME or a hub id.
        download: returns the folder of a hub model.
        flag: the option that gave the name, for errors.
    """
    path = Path(name)
    if os.path.isdir(path):  # unlike Path.is_dir, False also for names that are too long
        return path
    if name.startswith(EMBEDDED):
        from mame_sd.embedded.model import embedded_model_path

        try:
            return embedded_model_path(name.removeprefix(EMBEDDED))
        except FileNotFoundError as error:
            raise UserError(f"{flag} {name}: {error}") from None
    if os.path.isfile(path) or not HUB_ID.fullmatch(name):
        got = "got a file" if os.path.isfile(path) else "found nothing there"
        raise UserError(
            f"{flag} {name}: expected a folder or a hub id (owner/name), {got}; check the path"
        )
    try:
        return Path(download(name))
    except Exception as error:  # offline, unknown, gated, no such revision
        reason = first_line(error).partition(" (")[0]
        raise UserError(
            f"{flag} {name}: expected a folder, or a model of the hub that can be reached or is"
            f" cached, but {reason}; check the name and the network, or give a folder"
        ) from error


def check_tokenizers(folder: Path, flag: str = "--model") -> None:
    """Raise UserError for a tokenizer without vocabulary, which transformers loads as an empty one.

    `flag` is the option that gave the pipeline's folder.
    """
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    for name, entry in index.items():
        if not name.startswith("tokenizer") or not isinstance(entry, list) or entry[-1] is None:
            continue
        there = [file.name for file in (folder / name).glob("*") if file.is_file()]
        endings = ("_config.json", "special_tokens_map.json")
        if all(file.endswith(endings) for file in there):
            raise UserError(
                f"{flag} {folder}: expected the vocabulary of {name}, found"
                f" {'none' if there else 'no such folder'}; copy the whole model again"
            )


def digest_of(source: Path) -> str:
    """Return a digest of the names and contents of all files that decide pixels.

    It omits hidden files, model cards, Python's files, and settings of merging, which the manifest
    of a run has anyway.
    """
    digest = hashlib.sha256()
    root = source.parent if source.is_file() else source
    for path in [source] if source.is_file() else files_below(source):
        place = path.relative_to(root)
        hidden = path != source and any(part.startswith(".") for part in place.parts)
        if hidden or path.suffix in (".md", ".py", ".pyc") or path.name == SETTINGS_FILE:
            continue
        digest.update(f"{place.as_posix()}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def name_of(source: str) -> str:
    """Return the name of a folder or file without its path, or a hub id as it is."""
    if os.path.isdir(source):
        return shown(Path(source).resolve().name)
    return shown(os.path.basename(source)) if os.path.exists(source) else source


def name_and_digest(source: str) -> dict[str, str | None]:
    """Return the name and the digest of a folder or file; of a hub id the digest is None."""
    digest = digest_of(Path(source)) if os.path.exists(source) else None
    return {"name": name_of(source), "sha256": digest}
