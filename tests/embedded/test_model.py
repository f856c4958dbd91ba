"""Embedded models: their glyphs, captions and folders, and the defaults of their pipelines."""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors import safe_open

from mame_sd import apply_mame, embedded_pipeline
from mame_sd.embedded import model as subjects
from mame_sd.errors import UserError
from mame_sd.pipelines import StableDiffusionMaMePipeline
from mame_sd.runs.loading import add_loras, load_model
from mame_sd.runs.model_files import ModelChoice


def test_what_there_is_none_of_is_named() -> None:
    with pytest.raises(ValueError, match="'unicorn horn'"):
        subjects.render("unicorn horn", "white")
    assert subjects.embedded_model_path("unet") == subjects.embedded_model_path()
    for name in ("unicorn", "", "..", "../runs"):
        with pytest.raises(
            FileNotFoundError, match=r"an embedded model \((.*, )?unet.*, got '" + re.escape(name)
        ):
            subjects.embedded_model_path(name)


@pytest.mark.parametrize("name", subjects.embedded_models())
def test_files_name_no_folder_of_the_machine_that_made_them(name: str) -> None:
    folder = subjects.embedded_model_path(name)
    for path in folder.rglob("*.json"):
        assert "_name_or_path" not in path.read_text(encoding="utf-8"), path
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert name == "video" or {"script_sha256", "seed", "steps"} <= set(file.metadata())
            dtypes = {file.get_tensor(key).dtype for key in list(file.keys())[:20]}
            assert dtypes <= {torch.float16, torch.int64}


def test_the_transformer_generates_and_merges() -> None:
    pipe = embedded_pipeline("transformer")
    pipe.set_progress_bar_config(disable=True)

    def image(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        call = {"num_inference_steps": 1, "generator": generator, "output_type": "pt"}
        return pipe("rocket on a red brick background", **call).images

    whole, other = image(0), image(1)
    handle = apply_mame(pipe, keep=0.25)
    merged = image(0)
    kept = {"attention": 256, "text": 21}  # keys, and tokens in the text's MLPs
    layers = handle.report().layers
    assert all(layer.merged and layer.tokens_kept == kept[layer.kind] for layer in layers)
    assert whole.shape == (1, 3, 256, 256)
    assert 0 < (merged - whole).norm() < 0.5 * (other - whole).norm()


def test_calls_default_to_the_models_own_guidance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise InterruptedError

    monkeypatch.setattr(StableDiffusionPipeline, "encode_prompt", stop)
    pipe = embedded_pipeline()
    for call in ({}, {"guidance_scale": 3.0, "num_inference_steps": 2}):
        with pytest.raises(InterruptedError):
            pipe("key on a pink background", **call)
        assert pipe.guidance_scale == call.get("guidance_scale", 1.25)
    found = inspect.signature(pipe.__call__).parameters
    assert (found["num_inference_steps"].default, found["guidance_scale"].default) == (20, 1.25)
    with pytest.raises(
        TypeError, match=r"StableDiffusionPipeline.__call__\(\) got multiple values"
    ):
        pipe("key", prompt="key")
    pipe.save_pretrained(tmp_path / "saved")
    assert (
        type(StableDiffusionPipeline.from_pretrained(tmp_path / "saved")) is StableDiffusionPipeline
    )


def test_a_pipeline_class_of_ours_has_them_too() -> None:
    pipe = embedded_pipeline(kind=StableDiffusionMaMePipeline, keep=0.5)
    assert isinstance(pipe, StableDiffusionMaMePipeline)
    assert inspect.signature(pipe.__call__).parameters["guidance_scale"].default == 1.25
    assert pipe.keep == 0.5


def test_loading_warns_of_nothing_and_leaves_the_libraries_as_talkative(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        @staticmethod
        def from_pretrained(path: Any, **options: Any) -> Any:
            raise ValueError("nothing")

    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    levels = [logger.getEffectiveLevel() for logger in loggers]
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    embedded_pipeline("unet")
    with pytest.raises(ValueError, match="nothing"):
        embedded_pipeline("unet", kind=Refusing)
    assert caplog.messages == []
    assert [logger.getEffectiveLevel() for logger in loggers] == levels


def test_the_few_step_lora_loads_by_its_name_and_its_mlps_are_restored() -> None:
    choice = ModelChoice(model="embedded-transformer", loras=("embedded-few-steps",), device="cpu")
    pipe = load_model(choice).pipe
    plain = embedded_pipeline("transformer").transformer
    with pytest.raises(UserError, match="expected a LoRA for StableDiffusionPipeline"):
        add_loras(embedded_pipeline("unet"), choice)

    def latents(transformer: torch.nn.Module) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        call = {"num_inference_steps": 1, "guidance_scale": 1, "output_type": "latent"}
        pipe.transformer = transformer
        return pipe("rocket on a red brick background", **call, generator=generator).images

    with_lora = pipe.transformer
    learned = [m for m in with_lora.modules() if hasattr(m, "lora_A")]
    zero = [m for m in learned if not next(iter(m.lora_B.values())).weight.any()]
    assert (len(learned), len(zero)) == (75, 1)  # the last block's queries of text are not read
    whole, other = latents(with_lora), latents(plain)
    pipe.transformer = with_lora
    handle = apply_mame(pipe)
    merged = latents(with_lora)
    merging = {layer.kind for layer in handle.report().layers if layer.merged}
    assert merging == {"attention", "mlp", "text"}
    assert 0 < (merged - whole).norm() < 0.5 * (other - whole).norm()
