"""The training script runs through, and a killed and resumed run gives the very weights of an undisturbed one."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_embedded.py"


def start(work: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), "--smoke", "--work", str(work)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def weights(model: Path) -> dict[str, torch.Tensor]:
    files = sorted(model.rglob("*.safetensors"))
    return {f"{f.parent.name}.{k}": v.float() for f in files for k, v in load_file(f).items()}


def test_a_killed_and_resumed_training_gives_the_same_weights(tmp_path: Path) -> None:
    assert start(tmp_path / "whole").wait() == 0
    victim = start(tmp_path / "killed")
    while victim.poll() is None and not (tmp_path / "killed" / "patch2.pt").exists():
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert start(tmp_path / "killed").wait() == 0
    whole, resumed = weights(tmp_path / "whole" / "model"), weights(tmp_path / "killed" / "model")
    assert sorted(whole) == sorted(resumed)
    assert len(whole) > 500
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name

    with safe_open(tmp_path / "whole" / "model" / "unet" / "diffusion_pytorch_model.safetensors", "pt") as file:
        assert {"script_sha256", "seed", "steps"} <= set(file.metadata())
        assert all(file.get_tensor(key).isfinite().all() for key in list(file.keys()))
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "whole" / "model")
    pipe.set_progress_bar_config(disable=True)
    image = pipe("rocket on a light blue background", num_inference_steps=1).images[0]
    assert image.size == (256, 256)
    assert pipe.tokenizer.tokenize("jack-o-lantern on a pink background")[-3:] == [
        "a</w>",
        "pink</w>",
        "background</w>",
    ]
