"""The training script resumes where it was stopped, runs through, and writes a whole pipeline.

The transformer's tests kill a run, and see that the resumed one gives the very weights of an
undisturbed one. Both scripts train in `scripts.training.loop`.
"""

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file

from scripts.training import train_unet
from tests.builders.trainings import smoke, stopped


def weights(model: Path) -> dict[str, torch.Tensor]:
    files = sorted(model.rglob("*.safetensors"))
    return {f"{f.parent.name}.{k}": v.float() for f in files for k, v in load_file(f).items()}


@pytest.mark.training
def test_a_stopped_training_resumes_and_writes_a_pipeline(tmp_path: Path) -> None:
    stopped(train_unet, tmp_path, "patch2")
    latents, patch4 = ((tmp_path / f"{name}.pt").stat() for name in ("latents", "patch4"))
    assert not (tmp_path / "patch2.pt").exists()
    assert not (tmp_path / "model").exists()
    smoke(train_unet, tmp_path)
    assert (tmp_path / "latents.pt").stat().st_mtime_ns == latents.st_mtime_ns
    assert (tmp_path / "patch4.pt").stat().st_mtime_ns == patch4.st_mtime_ns
    assert len(weights(tmp_path / "model")) > 500

    with safe_open(
        tmp_path / "model" / "unet" / "diffusion_pytorch_model.safetensors", "pt"
    ) as file:
        assert {"script_sha256", "seed", "steps"} <= set(file.metadata())
        assert all(file.get_tensor(key).isfinite().all() for key in list(file.keys()))
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    image = pipe("rocket on a light blue background", num_inference_steps=1).images[0]
    assert image.size == (256, 256)
    assert pipe.tokenizer.tokenize("jack-o-lantern on a pink background")[-3:] == [
        "a</w>",
        "pink</w>",
        "background</w>",
    ]
