"""The training script survives a kill, runs through, and writes a whole pipeline.

That a resumed run gives the very weights of an undisturbed one is tested with the transformer's
script: both train in `scripts.training.loop`.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def start(work: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "scripts.training.train_unet", "--smoke", "--work", str(work)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def weights(model: Path) -> dict[str, torch.Tensor]:
    files = sorted(model.rglob("*.safetensors"))
    return {f"{f.parent.name}.{k}": v.float() for f in files for k, v in load_file(f).items()}


def test_a_killed_training_resumes_and_writes_a_pipeline(tmp_path: Path) -> None:
    victim = start(tmp_path)
    while victim.poll() is None and not (tmp_path / "patch4.pt").exists():
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    assert start(tmp_path).wait() == 0
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
