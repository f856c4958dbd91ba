"""Load any text-to-image pipeline: the embedded one, a folder, a hub id or a single .safetensors file.

Whatever goes wrong becomes a UserError that says what was expected, what came and what to do, or a MachineError when
memory runs out.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mame_sd.errors import MachineError, UserError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", {}),
    "dpm++-karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "dpm++-sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "pndm": ("PNDMScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
_SINGLE_FILE_CLASSES = {
    "v1": "StableDiffusionPipeline",
    "v2": "StableDiffusionPipeline",
    "xl_base": "StableDiffusionXLPipeline",
    "playground-v2-5": "StableDiffusionXLPipeline",
}
_HUB_ID = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+(?<!\.safetensors)")
_WHOLE_FILE_BYTES = 1 << 20


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


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A pipeline that is ready to be called.

    Attributes:
        pipe: the pipeline, on its device, without progress bars.
        identity: JSON values that tell this model from others: name, pipeline class, a digest of its files, scheduler,
            LoRAs, dtype and device type.
        guidance: the guidance scale that the model is called with when none is given; None: it takes none.
    """

    pipe: Any
    identity: dict[str, Any]
    guidance: float | None

    @property
    def arguments(self) -> frozenset[str]:
        """Names that a call of the pipeline takes."""
        return frozenset(inspect.signature(self.pipe.__call__).parameters)

    @property
    def default_size(self) -> tuple[int, int]:
        """(height, width) in pixels that the pipeline takes when it is given neither.

        Raises UserError for a pipeline that does not tell.
        """
        denoiser: Any = getattr(self.pipe, "unet", None) or self.pipe.transformer
        side = getattr(self.pipe, "default_sample_size", None) or denoiser.config.get("sample_size")
        factor = getattr(self.pipe, "vae_scale_factor", None)
        if not side or not factor:
            raise UserError(
                f"expected both --height and --width, got one, and {type(self.pipe).__name__} has no default"
            )
        height, width = (side, side) if isinstance(side, int) else side
        return height * factor, width * factor


def load_model(choice: ModelChoice) -> LoadedModel:
    """Load a text-to-image pipeline.

    Raises:
        UserError: nothing there, no such pipeline, hub not reachable, unknown scheduler, dtype or device.
        MachineError: out of memory.
    """
    device = pick_device(choice.device, choice.local_rank)
    dtype = _pick_dtype(choice.dtype, device)
    check_scheduler(choice.scheduler)
    _be_quiet()
    source, name = find_model(choice)
    with _loading(name):
        pipe = _load_file(source, choice, dtype) if source.is_file() else _load_folder(source, choice, dtype)
    _check_text_to_image(pipe, name)
    if choice.scheduler is not None:
        _set_scheduler(pipe, choice.scheduler)
    for index, lora in enumerate(choice.loras):
        _add_lora(pipe, lora, index, choice.offline)
    if len(choice.loras) > 1:
        pipe.set_adapters([f"lora{i}" for i in range(len(choice.loras))], [_lora_scale(lo)[1] for lo in choice.loras])
    with _loading(name):
        pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    identity = {
        "name": name,
        "pipeline": type(pipe).__name__,
        "sha256": _digest(source),
        "scheduler": type(pipe.scheduler).__name__ if choice.scheduler is None else choice.scheduler,
        "loras": [_lora_identity(lora) for lora in choice.loras],
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
    }
    return LoadedModel(pipe=pipe, identity=identity, guidance=_default_guidance(pipe, choice))


def find_model(choice: ModelChoice) -> tuple[Path, str]:
    """The file or folder that `choice.model` means, downloaded if need be, and a name for it without its place.

    Raises UserError when there is none.
    """
    if choice.model is None:
        from mame_sd.embedded_model import embedded_model_path

        try:
            return embedded_model_path(), "embedded"
        except FileNotFoundError as error:
            raise UserError(f"--model: {error}") from None
    path = Path(choice.model)
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            raise UserError(
                f"--model {path}: expected the folder of a diffusers pipeline, got one without model_index.json; "
                "give the folder that holds it"
            )
        return path, path.resolve().name
    if path.is_file():
        if path.suffix.lower() != ".safetensors":
            raise UserError(
                f"--model {path}: expected a folder, a hub id or a .safetensors file, got another file; convert it"
            )
        return path, path.name
    if not _HUB_ID.fullmatch(choice.model):
        raise UserError(
            f"--model {choice.model}: expected a folder, a .safetensors file or a hub id (owner/name), "
            "found no such file; check the path"
        )
    return _download(choice), choice.model


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `name` means here. Raises UserError when there is none such."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise UserError(f"--device {name}: expected auto, cpu, cuda, cuda:N or mps; give one of these") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if (device.index or 0) >= count:
            raise UserError(
                f"--device {device}: expected one of the {count} CUDA devices of this machine; give --device cpu"
            )
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: expected a machine with Metal, got none; give --device cpu")
    elif device.type not in ("cpu", "mps"):
        raise UserError(f"--device {name}: expected auto, cpu, cuda, cuda:N or mps; give one of these")
    return device


def check_scheduler(name: str | None) -> None:
    """Raise UserError for a scheduler that is none of `SCHEDULERS`."""
    if name is not None and name not in SCHEDULERS:
        raise UserError(
            f"--scheduler: expected one of {', '.join(SCHEDULERS)}, got {name!r}; leave it out for the model's own"
        )


def _pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UserError(f"--dtype: expected auto, {', '.join(DTYPES)}, got {name!r}; give one of these")
    return DTYPES[name]


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    except (UserError, MachineError):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MachineError(
            f"--model {name}: expected it to fit into memory, it does not: {first_line(error)}"
        ) from error
    except Exception as error:  # diffusers, transformers and safetensors raise dozens of kinds here
        raise UserError(
            f"--model {name}: expected a text-to-image pipeline that diffusers can load, but {first_line(error)}; "
            "check its files, --variant and --revision"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, its type where there is none, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return (line if len(line) <= 200 else line[:197] + "...").rstrip(".")


def _be_quiet() -> None:
    """Keep the libraries' bars and notices off stderr; errors still come as exceptions."""
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


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


def _load_folder(folder: Path, choice: ModelChoice, dtype: torch.dtype) -> Any:
    import diffusers

    config = diffusers.DiffusionPipeline.load_config(str(folder))
    name = config.get("_class_name")
    name = name[-1] if isinstance(name, (list, tuple)) else name
    # Our own subclass adds nothing that merging from outside needs, and diffusers does not find it by name.
    name = "StableDiffusionPipeline" if name == "StableDiffusionMaMePipeline" else name
    kind = getattr(diffusers, str(name), None)
    if kind is None:
        raise UserError(f"--model {folder}: expected a pipeline class of diffusers, got {name!r}; convert the model")
    return kind.from_pretrained(str(folder), dtype=dtype, variant=choice.variant, local_files_only=choice.offline)


def _load_file(path: Path, choice: ModelChoice, dtype: torch.dtype) -> Any:
    import diffusers
    from diffusers.loaders.single_file_utils import infer_diffusers_model_type
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        shapes = {key: torch.empty(file.get_slice(key).get_shape(), device="meta") for key in file.keys()}  # noqa: SIM118
    kind = infer_diffusers_model_type(shapes)
    has_unet = any(key.startswith("model.diffusion_model.input_blocks.") for key in shapes)
    if kind not in _SINGLE_FILE_CLASSES or not has_unet:
        raise UserError(
            f"--model {path}: expected a checkpoint of Stable Diffusion 1, 2 or XL in its original layout, got "
            f"{kind if has_unet else 'something else'}; give a diffusers folder instead"
        )
    config = choice.single_file_config
    try:
        return getattr(diffusers, _SINGLE_FILE_CLASSES[kind]).from_single_file(
            str(path), config=config, dtype=dtype, local_files_only=choice.offline
        )
    except Exception as error:
        if config is not None:
            raise
        raise UserError(
            f"--model {path}: expected the hub's configuration for this architecture, but {first_line(error)}; "
            "give a pipeline folder of the same architecture as --single-file-config"
        ) from error


def _check_text_to_image(pipe: Any, name: str) -> None:
    parameters = inspect.signature(pipe.__call__).parameters
    needed = [p for p in ("image", "mask_image", "video", "audio") if p in parameters]
    if "prompt" not in parameters or "num_inference_steps" not in parameters or needed:
        raise UserError(
            f"--model {name}: expected a text-to-image pipeline, got {type(pipe).__name__}"
            f"{', which wants ' + needed[0] if needed else ''}; give another model"
        )
    if not (hasattr(pipe, "unet") or hasattr(pipe, "transformer")):
        raise UserError(f"--model {name}: expected a pipeline with a unet or transformer, got {type(pipe).__name__}")


def _set_scheduler(pipe: Any, name: str) -> None:
    """Put the named scheduler in place of the model's, with the model's noise schedule."""
    import diffusers

    class_name, extra = SCHEDULERS[name]
    if class_name not in {kind.__name__ for kind in [*pipe.scheduler.compatibles, type(pipe.scheduler)]}:
        raise UserError(
            f"--scheduler {name}: expected a scheduler that fits the model's {type(pipe.scheduler).__name__}, "
            f"got {class_name}; leave it out"
        )
    try:
        pipe.scheduler = getattr(diffusers, class_name).from_config(pipe.scheduler.config, **extra)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise UserError(
            f"--scheduler {name}: expected it to fit this model, but {first_line(error)}; choose another"
        ) from error


def _lora_scale(lora: str) -> tuple[str, float]:
    """PATH_OR_ID and scale of one --lora; Raises UserError for a scale that is no finite number."""
    source, mark, scale = lora.rpartition(":")
    if not mark or os.path.exists(lora):
        return lora, 1.0
    try:
        value = float(scale)
    except ValueError:
        return lora, 1.0
    if value != value or value in (float("inf"), float("-inf")):
        raise UserError(f"--lora {lora}: expected a finite scale after the colon, got {scale}; give one such as 0.8")
    return source, value


def _lora_identity(lora: str) -> dict[str, Any]:
    source, scale = _lora_scale(lora)
    path = Path(source)
    return {
        "name": path.name if path.exists() else source,
        "scale": scale,
        "sha256": _digest(path) if path.exists() else None,
    }


def _add_lora(pipe: Any, lora: str, index: int, offline: bool) -> None:
    source, scale = _lora_scale(lora)
    if not hasattr(pipe, "load_lora_weights"):
        raise UserError(
            f"--lora {source}: expected a pipeline that takes LoRAs, got {type(pipe).__name__}; leave it out"
        )
    path = Path(source)
    if not path.exists() and not _HUB_ID.fullmatch(source):
        raise UserError(
            f"--lora {source}: expected a .safetensors file, a folder or a hub id, found nothing; check the path"
        )
    where: dict[str, Any] = {"weight_name": path.name} if path.is_file() else {}
    try:
        pipe.load_lora_weights(
            str(path.parent) if path.is_file() else source,
            adapter_name=f"lora{index}",
            local_files_only=offline,
            **where,
        )
        pipe.set_adapters(f"lora{index}", scale)
    except Exception as error:  # PEFT missing, foreign keys, wrong shapes, unreachable hub
        hint = "pip install peft" if "PEFT" in str(error) else "check that it was made for this model"
        raise UserError(
            f"--lora {source}: expected a LoRA for {type(pipe).__name__}, but {first_line(error)}; {hint}"
        ) from error


def _default_guidance(pipe: Any, choice: ModelChoice) -> float | None:
    parameter = inspect.signature(pipe.__call__).parameters.get("guidance_scale")
    if parameter is None:
        return None
    if choice.model is None:
        import mame_sd.embedded_model

        return float(getattr(mame_sd.embedded_model, "DEFAULT_GUIDANCE", parameter.default))
    return float(parameter.default)


def _digest(source: Path) -> str:
    """A digest of names, sizes and contents; of files above a mebibyte only both ends are read."""
    digest = hashlib.sha256()
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    for path in files:
        if any(part.startswith(".") for part in path.relative_to(source).parts):
            continue
        size = path.stat().st_size
        name = path.name if path == source else path.relative_to(source).as_posix()
        digest.update(f"{name}\0{size}\0".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_WHOLE_FILE_BYTES))
            if size > _WHOLE_FILE_BYTES:
                file.seek(-min(_WHOLE_FILE_BYTES, size - _WHOLE_FILE_BYTES), os.SEEK_END)
                digest.update(file.read())
    return digest.hexdigest()
