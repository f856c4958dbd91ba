"""Load a text-to-image pipeline: an embedded one, a folder, a hub id or a .safetensors file."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mame_sd.config import MaMeConfig
from mame_sd.diffusion.denoisers import denoiser_of
from mame_sd.diffusion.saved_setting import resolved
from mame_sd.embedded.model import DEFAULT_GUIDANCE
from mame_sd.errors import MachineError, UserError, first_line, unexpected
from mame_sd.report import NOTHING_MERGES
from mame_sd.runs.devices import dtype_argument, pick_device, pick_dtype
from mame_sd.runs.model_files import (
    ModelChoice,
    check_tokenizers,
    digest_of,
    find_folder,
    find_model,
    read_lora,
)

# Arguments of pipelines that need more than a prompt, or make video or audio.
_OTHER_ARGUMENTS = (
    *("image", "control_image", "reference_image", "mask_image"),
    *("video", "num_frames", "video_length", "num_videos_per_prompt"),
    *("audio_duration", "audio_duration_s", "audio_end_in_s", "num_waveforms_per_prompt"),
)
# Classes of the checkpoints in Stable Diffusion's original layout that diffusers tells apart.
_SINGLE_FILE_CLASSES = {
    "v1": "StableDiffusionPipeline",
    "v2": "StableDiffusionPipeline",
    "xl_base": "StableDiffusionXLPipeline",
    "playground-v2-5": "StableDiffusionXLPipeline",
}
# Schedulers of LoRAs for few steps. They read any schedule of betas, which diffusers doesn't say.
_FEW_STEP_SCHEDULERS = ("LCMScheduler", "TCDScheduler")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A pipeline that is ready to be called.

    Attributes:
        pipe: the pipeline on its device, without progress bars.
        identity: JSON values that distinguish this model from others.
        guidance: default guidance scale; None if the pipeline takes none.
    """

    pipe: Any
    identity: dict[str, Any]
    guidance: float | None

    @property
    def arguments(self) -> frozenset[str]:
        """Return the names of the arguments that a call of the pipeline takes."""
        return frozenset(inspect.signature(self.pipe.__call__).parameters)

    def resolved(self, config: MaMeConfig) -> MaMeConfig:
        """Return `config` with the model's decisions on what it leaves open."""
        try:
            return resolved(denoiser_of(self.pipe), config)
        except TypeError:  # nothing can merge, which `Merging.install` refuses
            return config
        except ValueError as error:  # of the settings next to the weights
            raise UserError(f"--model {self.identity['name']}: {error}") from None


def load_model(choice: ModelChoice, local_rank: int = 0) -> LoadedModel:
    """Load a text-to-image pipeline.

    `local_rank` is the number of the CUDA device that "auto" and "cuda" mean.

    Raises:
        UserError: no such model, pipeline, device or scheduler, or the hub can't be reached.
        MachineError: there is not enough memory, or a package does not load.
    """
    device = pick_device(choice.device, local_rank)
    dtype = pick_dtype(choice.dtype, device)
    known = known_identity(choice)
    _silence_libraries()
    source, name = find_model(choice), choice.name
    with _loading(name):
        pipe = (_load_single_file if source.is_file() else _load_folder)(source, choice, dtype)
        parts = {n: part for n, part in pipe.components.items() if isinstance(part, nn.Module)}
        for weight, values in nn.ModuleDict(parts).named_parameters():
            if values.is_meta:  # the file lacks it
                raise UserError(
                    f"--model {name}: expected the tensor {weight}, found none; download it again"
                )
        if choice.scheduler is not None:
            _set_scheduler(pipe, choice.scheduler)
        add_loras(pipe, choice)
        pipe.set_progress_bar_config(disable=True)
        pipe.to(device)
        digest = digest_of(source)
    classes = {"scheduler": type(pipe.scheduler).__name__, "pipeline": type(pipe).__name__}
    identity = {**classes, "sha256": digest, **known}
    _, guidance = guidance_of(pipe)
    if guidance is not None:
        guidance = DEFAULT_GUIDANCE.get(choice.embedded or "", guidance)
    return LoadedModel(pipe=pipe, identity=identity, guidance=guidance)


def guidance_of(pipe: Any) -> tuple[str, float | None]:
    """Return the name of the argument for classifier-free guidance, and its default or None.

    A `guidance_scale` without a default is that of distilled models (Qwen-Image).
    """
    taken = inspect.signature(pipe.__call__).parameters
    for name in ("guidance_scale", "true_cfg_scale"):
        if name in taken and isinstance(taken[name].default, (int, float)):
            return name, float(taken[name].default)
    return "guidance_scale", None


def known_identity(choice: ModelChoice) -> dict[str, Any]:
    """Return the part of a model's identity that is known before the model is loaded.

    Raises:
        UserError: this machine has no such device, or a LoRA is not there.
    """
    device = pick_device(choice.device)
    dtype = str(pick_dtype(choice.dtype, device)).removeprefix("torch.")
    return {**choice.identity(), "dtype": dtype, "device": device.type}


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    except (UserError, MachineError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # diffusers, transformers and safetensors raise dozens of kinds
        if isinstance(error, ImportError) or str(error).startswith("Failed to import"):
            cause = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise MachineError(
                f"--model {name}: a package that it needs does not load ({cause}); install it with"
                " pip"
            ) from error
        raise UserError(
            f"--model {name}: expected a text-to-image pipeline that diffusers can load, but"
            f" {first_line(error)}; check its files, --variant, --revision and"
            " --single-file-config"
        ) from error


def _silence_libraries() -> None:
    """Keep bars and notices off stderr; errors are exceptions anyway."""
    import diffusers.utils.logging
    import transformers.utils.logging

    warnings.filterwarnings("ignore", NOTHING_MERGES)  # commands print a line of their own
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _load_folder(folder: Path, choice: ModelChoice, dtype: torch.dtype) -> Any:
    import diffusers

    name = diffusers.DiffusionPipeline.load_config(str(folder)).get("_class_name")
    name = name[-1] if isinstance(name, (list, tuple)) else name
    kind = getattr(diffusers, str(name), None)
    check_tokenizers(folder)
    if kind is None:
        allowed = "a pipeline class of diffusers"
        raise unexpected(f"--model {folder}", allowed, repr(name), "convert the model")
    check_text_to_image(kind, choice.name)
    options = dtype_argument(dtype)
    pipe = kind.from_pretrained(
        str(folder), variant=choice.variant, local_files_only=choice.offline, **options
    )
    return pipe if type(pipe) is kind else kind.from_pipe(pipe, **options)  # of a custom class


def _load_single_file(path: Path, choice: ModelChoice, dtype: torch.dtype) -> Any:
    """Load a .safetensors checkpoint of Stable Diffusion 1, 2 or XL in its original layout.

    It holds weights alone. Configurations, scheduler and tokenizers come from a pipeline of the
    same architecture: --single-file-config, or the hub's pipeline that diffusers knows.
    """
    import diffusers
    from diffusers.loaders.single_file_utils import (
        fetch_diffusers_config,
        infer_diffusers_model_type,
    )
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        sizes = {key: file.get_slice(key).get_shape() for key in list(file.keys())}
    shapes = {key: torch.empty(size, device="meta") for key, size in sizes.items()}
    kind = "another layout"
    if any(key.startswith("model.diffusion_model.input_blocks.") for key in shapes):
        kind = infer_diffusers_model_type(shapes)
    if kind not in _SINGLE_FILE_CLASSES:
        allowed = "a checkpoint of Stable Diffusion 1, 2 or XL in its original layout"
        raise unexpected(f"--model {path}", allowed, kind, "give a diffusers folder instead")

    def download(name: str) -> str:  # diffusers would ignore --offline
        files = ["*.json", "*.txt", "*.model"]
        return snapshot_download(name, local_files_only=choice.offline, allow_patterns=files)

    config = choice.single_file_config
    config = config or fetch_diffusers_config(shapes)["pretrained_model_name_or_path"]
    folder = find_folder(config, download, "--single-file-config")
    check_tokenizers(folder, "--single-file-config")
    return getattr(diffusers, _SINGLE_FILE_CLASSES[kind]).from_single_file(
        str(path), config=str(folder), **dtype_argument(dtype)
    )


def _set_scheduler(pipe: Any, name: str) -> None:
    """Replace the scheduler by that class of diffusers, with the model's noise schedule."""
    import diffusers

    kinds = {kind.__name__: kind for kind in (*pipe.scheduler.compatibles, type(pipe.scheduler))}
    if "DDIMScheduler" in kinds:  # a schedule of betas
        kinds |= {few: getattr(diffusers, few) for few in _FEW_STEP_SCHEDULERS}
    try:
        pipe.scheduler = kinds[name].from_config(pipe.scheduler.config)
    except (KeyError, ImportError, NotImplementedError, ValueError) as error:
        why = "" if isinstance(error, KeyError) else f" ({first_line(error)})"
        allowed = f"one that fits the model's ({', '.join(sorted(kinds))})"
        advice = "leave it out for the model's own"
        raise unexpected("--scheduler", allowed, f"{name}{why}", advice) from None


def add_loras(pipe: Any, choice: ModelChoice) -> None:
    """Load the chosen LoRAs into a pipeline, and switch all of them on.

    Raises:
        UserError: one is made for another model, or PEFT is missing.
    """
    scales = {}
    for number, (source, scale) in enumerate(map(read_lora, choice.loras)):
        path, scales[f"lora{number}"] = Path(source), scale
        where: dict[str, Any] = {"weight_name": path.name} if path.is_file() else {}
        place = str(path.parent) if path.is_file() else source
        try:
            where |= {"adapter_name": f"lora{number}", "local_files_only": choice.offline}
            pipe.load_lora_weights(place, **where)
            pipe.set_adapters(list(scales), list(scales.values()))
        except Exception as error:  # PEFT missing, foreign keys, wrong shapes, unreachable hub
            peft = "PEFT" in str(error)
            hint = "pip install peft" if peft else "check that it was made for this model"
            raise UserError(
                f"--lora {source}: expected a LoRA for {type(pipe).__name__}, but"
                f" {first_line(error)}; {hint}"
            ) from error


def check_text_to_image(kind: Any, name: str) -> None:
    """Raise UserError for a class of pipelines that don't make images from a prompt alone."""
    taken, parts = (inspect.signature(f).parameters for f in (kind.__call__, kind.__init__))
    denoises = "unet" in parts or "transformer" in parts
    foreign = [parameter for parameter in _OTHER_ARGUMENTS if parameter in taken]
    if not {"prompt", "num_inference_steps"} <= set(taken) or not denoises or foreign:
        wants = f"{kind.__name__}, which takes {foreign[0]}" if foreign else kind.__name__
        allowed = "a text-to-image pipeline with a unet or transformer"
        raise unexpected(f"--model {name}", allowed, wants, "give another model")
