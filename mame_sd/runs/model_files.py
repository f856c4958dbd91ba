"""Where a model's files are: which folder or file a name means, hub downloads, a digest that tells models apart."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from mame_sd.errors import UserError

# owner/name, neither part hidden, and no file
HUB_ID = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+(?<!\.safetensors)")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What to load and how.

    Attributes:
        model: folder, hub id or .safetensors file; None: the embedded model.
        dtype: a name of `DTYPES`, or "auto": float16 on CUDA, float32 elsewhere.
        device: as in torch, or "auto": CUDA if there is one, then MPS, then the CPU.
        scheduler: a name of `SCHEDULERS`; None: the model's own.
        loras: each PATH_OR_ID or PATH_OR_ID:SCALE.
        variant, revision: of a hub model ("fp16"; branch, tag or commit).
        offline: never ask the hub, take what is cached.
        single_file_config: for a .safetensors file, a folder or hub id of a pipeline of the same architecture.
        local_rank: which CUDA device "auto" and "cuda" mean, among several processes.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    scheduler: str | None = None
    loras: tuple[str, ...] = ()
    variant: str | None = None
    revision: str | None = None
    offline: bool = False
    single_file_config: str | None = None
    local_rank: int = 0


def find_model(choice: ModelChoice) -> tuple[Path, str]:
    """The file or folder that `choice.model` means, downloaded if need be, and a name for it without its place.

    Raises UserError when there is none.
    """
    if choice.model is None:
        from mame_sd.embedded.model import embedded_model_path

        try:
            return embedded_model_path(), "embedded"
        except FileNotFoundError as error:
            raise UserError(f"--model: {error}") from None
    path = Path(choice.model)
    if os.path.isdir(path):  # unlike Path.is_dir, False also for names that are too long or out of reach
        if not os.path.isfile(path / "model_index.json"):
            raise UserError(
                f"--model {path}: expected the folder of a diffusers pipeline, got one without model_index.json; "
                "give the folder that holds it"
            )
        return path, path.resolve().name
    if os.path.isfile(path):
        if path.suffix.lower() != ".safetensors":
            raise UserError(
                f"--model {path}: expected a folder, a hub id or a .safetensors file, got another file; convert it"
            )
        return path, path.name
    if not HUB_ID.fullmatch(choice.model):
        raise UserError(
            f"--model {choice.model}: expected a folder, a .safetensors file or a hub id (owner/name), "
            "found no such file; check the path"
        )
    return _download(choice), choice.model


def _download(choice: ModelChoice) -> Path:
    """The cached snapshot of a hub model, fetched when it is not there yet."""
    from diffusers import DiffusionPipeline

    try:
        folder = DiffusionPipeline.download(
            choice.model, variant=choice.variant, revision=choice.revision, local_files_only=choice.offline
        )
    except Exception as error:  # offline, unknown id, gated, no such revision: all mean that it can't be had
        reason = first_line(error).partition(" (")[0]
        raise UserError(
            f"--model {choice.model}: expected a folder, a .safetensors file, or a model of the hub that can be reached "
            f"or is cached, but {reason}; check the name and the network, or give a folder"
        ) from error
    return Path(folder)


def digest_of(source: Path) -> str:
    """A digest of names, sizes and whole contents; hidden files, model cards and Python's files paint nothing and are left out."""
    digest = hashlib.sha256()
    files = (
        [source]
        if source.is_file()
        else sorted(p for p in source.rglob("*") if p.is_file() and p.suffix not in (".md", ".py", ".pyc"))
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
    """JSON values for a path or a hub id: a name without its place, and a digest of what lies there (None: a hub id)."""
    path = Path(source)
    return (
        {"name": path.resolve().name, "sha256": digest_of(path)}
        if os.path.exists(path)
        else {"name": source, "sha256": None}
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, its type where there is none, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return line.rstrip(".") if len(line) <= 200 else line[:197] + "..."
