"""Loading models: what identifies one, schedulers, LoRAs, sizes, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    FluxControlPipeline,
    FluxPipeline,
    QwenImagePipeline,
    SanaVideoPipeline,
    StableAudioPipeline,
    StableDiffusionInpaintPipeline,
    TextToVideoSDPipeline,
    WanPipeline,
)
from diffusers.loaders import StableDiffusionLoraLoaderMixin
from safetensors.torch import load_file, save_file

from mame_sd.cli.generate import load
from mame_sd.embedded import model as subjects
from mame_sd.errors import MachineError, UserError
from mame_sd.runs.devices import dtype_argument, pick_device
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import (
    LoadedModel,
    _loading,
    check_text_to_image,
    guidance_of,
    load_model,
)
from mame_sd.runs.model_files import ModelChoice, digest_of, find_model
from mame_sd.runs.prompt_files import prompts_from_texts
from mame_sd.runs.sampling import _arguments, sample
from tests.builders.single_file import save_single_file
from tests.builders.tiny import generate as images_of
from tests.builders.tiny import save_tiny_pipeline, tiny_components, tiny_pipeline

PROMPT, FAST = prompts_from_texts(["key"]), GenerateSettings(steps=1)


def choice(folder: Path, *loras: str, **given: Any) -> ModelChoice:
    return ModelChoice(model=str(folder), device="cpu", loras=loras, **given)


def test_identity_follows_the_files_not_their_place(
    model: LoadedModel, model_folder: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(model_folder, tmp_path / "elsewhere" / "tiny"))
    found = load_model(choice(moved)).identity
    assert found == model.identity
    assert [found[key] for key in ("name", "scheduler")] == ["tiny", "DDIMScheduler"]
    assert found["dtype"] == "float32"
    file = tmp_path / ".model.safetensors"  # hidden, which a folder's files may not be
    digests = {digest_of(moved)}
    for position in (0, 2_500_000, 4_999_999):
        data = bytearray(5_000_000)
        data[position] = 1
        file.write_bytes(data)
        digests.add(digest_of(file))
    file.rename(moved / "unet" / "other.safetensors")
    assert len({*digests, digest_of(moved)}) == 5


def test_a_scheduler_keeps_the_models_noise_schedule(model_folder: Path) -> None:
    for name in ("DPMSolverMultistepScheduler", "LCMScheduler"):
        model = load_model(choice(model_folder, scheduler=name))
        assert type(model.pipe.scheduler).__name__ == model.identity["scheduler"] == name
        assert model.pipe.scheduler.config.beta_end == 0.012
    with pytest.raises(UserError, match=r"fits the model's \(.*DDIMScheduler, .*\), got magic;"):
        load_model(choice(model_folder, scheduler="magic"))


def test_loras_change_images_and_identity(model_folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pipe = tiny_pipeline()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        pipe.unet.add_adapter(
            peft.LoraConfig(r=2, init_lora_weights="gaussian", target_modules=["to_q", "to_v"])
        )
        for name, parameter in pipe.unet.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    layers = peft.get_peft_model_state_dict(pipe.unet)
    StableDiffusionLoraLoaderMixin.save_lora_weights(
        tmp_path, unet_lora_layers=layers, weight_name="style.safetensors"
    )
    file = str(tmp_path / "style.safetensors")
    images = []
    scales = {(): [], (file,): [1.0], (f"{file}:0.5",): [0.5], (file, f"{file}:0"): [1.0, 0.0]}
    for loras, expected in scales.items():
        model = load_model(choice(model_folder, *loras))
        assert [lora["scale"] for lora in model.identity["loras"]] == expected
        (image,) = sample(model, FAST, jobs_of(PROMPT, FAST))
        images.append(image.tobytes())
    assert len(set(images[:3])) == 3
    assert images[3] == images[1]
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(UserError, match="expected a LoRA for StableDiffusionPipeline"):
        load_model(choice(model_folder, str(tmp_path / "bad.safetensors")))


def test_devices_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto") == pick_device("cpu:0") == torch.device("cpu")
    for name in ("mps", "mps:0", "cuda", "meta"):
        with pytest.raises(UserError, match=rf"--device {name}: expected auto or .* \(cpu\); giv"):
            pick_device(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [pick_device(name, 1).index for name in ("auto", "cuda", "cuda:0")]
    assert found == [1, 1, 0]
    with pytest.raises(UserError, match=r"\(cpu, cuda:0, cuda:1\)"):
        pick_device("cuda", 2)


def test_pipelines_that_are_no_text_to_image_are_refused(tmp_path: Path) -> None:
    inpaint = StableDiffusionInpaintPipeline(**tiny_components(in_channels=9))
    inpaint.save_pretrained(tmp_path / "inpaint")
    shutil.rmtree(tmp_path / "inpaint" / "unet")  # no weights are read
    with pytest.raises(UserError, match="StableDiffusionInpaintPipeline, which takes image"):
        load_model(choice(tmp_path / "inpaint"))
    kinds = TextToVideoSDPipeline, WanPipeline, StableAudioPipeline
    for kind in (*kinds, SanaVideoPipeline, FluxControlPipeline):
        with pytest.raises(UserError, match=f"expected a text-to-image .*, got {kind.__name__}, w"):
            check_text_to_image(kind, "x")

    class JoyImageEditPlus:
        def __init__(self, transformer: Any) -> None: ...

        def __call__(self, prompt: Any, num_inference_steps: int, images: Any = None) -> None: ...

    for able in (FluxPipeline, QwenImagePipeline, JoyImageEditPlus):
        check_text_to_image(able, "x")  # the last one can do without images


def test_old_diffusers_are_told_the_number_format_by_its_old_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version, name in {
        "0.39.0": "torch_dtype",
        "0.40.0": "dtype",
        "1.0.0.dev0": "dtype",
    }.items():
        monkeypatch.setattr(diffusers, "__version__", version)
        assert dtype_argument(torch.float16) == {name: torch.float16}


def test_guidance_is_the_argument_that_steers_away_from_a_negative_prompt() -> None:
    """Flux reads no negative prompt by its own guidance, and Qwen-Image no guidance without one."""

    def call(kind: type, negative: str | None, guidance: float | None) -> dict[str, Any]:
        pipe = kind.__new__(kind)  # its arguments alone decide
        settings = GenerateSettings(negative_prompt=negative, guidance=guidance)
        model = LoadedModel(pipe=pipe, identity={}, guidance=guidance_of(pipe)[1])
        return _arguments(model, settings, jobs_of(PROMPT, settings))

    assert call(QwenImagePipeline, None, None)["true_cfg_scale"] == 4.0
    qwen, flux = call(QwenImagePipeline, "red", 7.0), call(FluxPipeline, None, 7.0)
    assert (qwen["true_cfg_scale"], "guidance_scale" in qwen) == (7.0, False)
    assert (flux["guidance_scale"], "true_cfg_scale" in flux) == (7.0, False)
    with pytest.raises(UserError, match="--guidance: QwenImagePipeline guides away from"):
        call(QwenImagePipeline, None, 7.0)
    with pytest.raises(UserError, match="--negative-prompt: FluxPipeline ignores it"):
        call(FluxPipeline, "red", None)


def test_our_own_pipeline_loads_without_its_class(tmp_path: Path) -> None:
    from mame_sd.pipelines import StableDiffusionMaMePipeline

    StableDiffusionMaMePipeline(**tiny_components(), tau=0.5).save_pretrained(tmp_path / "ours")
    model = load_model(choice(tmp_path / "ours", dtype="bfloat16"))
    assert type(model.pipe).__name__ == "StableDiffusionPipeline"
    assert model.pipe.unet.dtype == torch.bfloat16


def single(file: Path, config: Path | str | None = None, dtype: str = "auto") -> ModelChoice:
    given = None if config is None else str(config)
    return choice(file, single_file_config=given, offline=True, dtype=dtype)


def test_a_single_file_gives_the_pipeline_that_it_was_made_of(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save_single_file(tiny_pipeline(), tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_index.json").write_text("{another folder's")
    model = load(single(file, model_folder))
    assert torch.equal(images_of(model.pipe), images_of(tiny_pipeline()))
    assert load_model(single(file, model_folder, "bfloat16")).pipe.unet.dtype == torch.bfloat16
    found = [model.identity[key] for key in ("name", "pipeline", "sha256", "single_file_config")]
    config = {"name": "tiny", "sha256": digest_of(model_folder)}
    assert found == ["model.safetensors", "StableDiffusionPipeline", digest_of(file), config]


FIRST = "model.diffusion_model.input_blocks.0.0.weight"
XL = "conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"x": (1,)}, "Diffusion 1, 2 or XL in its original layout, got another layout; give a"),
        ({FIRST: (4, 9, 3, 3)}, "got inpainting; give a diffusers folder"),
        ({FIRST: (4, 4, 3, 3)}, "--single-file-config stable-diffusion-v1-5/.* can be reached"),
        ({FIRST: (4, 4, 3, 3), XL: (4,)}, "--single-file-config stabilityai/stable-diffusion-xl"),
    ],
    ids=["other layout", "other kind", "hub, v1", "hub, xl"],
)
def test_a_single_file_that_is_not_taken_or_needs_the_hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: dict[str, tuple[int, ...]],
    message: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    file = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in weights.items()}, file)
    with pytest.raises(UserError, match=message):
        load_model(single(file))


def test_a_configuration_that_does_not_fit_the_single_file(
    model_folder: Path, tmp_path: Path
) -> None:
    file = save_single_file(tiny_pipeline(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"expected shape .*; check .* --single-file-config"):
        load_model(single(file, "embedded-unet"))
    folder = Path(shutil.copytree(model_folder, tmp_path / "config"))
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(UserError, match=r"--single-file-config .* expected the vocabulary of tok"):
        load_model(single(file, folder))


def test_embedded_models_go_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(ModelChoice(model="embedded-unet")) == find_model(ModelChoice())
    monkeypatch.chdir(tmp_path)
    save_tiny_pipeline(tmp_path / "embedded-unet")  # a folder of that name goes before
    model = load_model(ModelChoice(model="embedded-unet", device="cpu"))
    assert (model.identity["name"], model.guidance) == ("embedded-unet", 7.5)
    monkeypatch.setattr(subjects, "models_folder", lambda: tmp_path / "embedded")
    save_tiny_pipeline(tmp_path / "embedded" / "tiny")
    (tmp_path / "embedded" / "clip").mkdir()
    (tmp_path / "embedded" / "clip" / "config.json").write_text("{}")
    model = load_model(ModelChoice(model="embedded-tiny", device="cpu"))
    assert (model.identity["name"], model.guidance) == ("embedded-tiny", 7.5)
    with pytest.raises(UserError, match=r"clip: expected the folder of a diffusers pipeline"):
        find_model(ModelChoice(model="embedded-clip"))


@pytest.mark.parametrize("error", [ImportError("no xformers"), RuntimeError("Failed to import x")])
def test_a_package_that_does_not_load_is_the_machines_fault(error: Exception) -> None:
    with pytest.raises(MachineError, match="a package that it needs does not load"), _loading("x"):
        raise error


def test_what_a_damaged_folder_lacks_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["conv_in.bias"]
    save_file(weights, file)
    with pytest.raises(UserError, match=r"conv_in\.bias"):
        load_model(choice(folder))
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(UserError, match="the vocabulary of tokenizer, found no such folder"):
        load_model(choice(folder))


def test_pixels_that_are_no_numbers_are_the_machines_fault(model_folder: Path) -> None:
    model = load_model(choice(model_folder))
    torch.nn.init.constant_(model.pipe.unet.conv_in.weight, torch.nan)
    with pytest.raises(MachineError, match="expected finite numbers for pixels"):
        sample(model, FAST, jobs_of(PROMPT, FAST))
