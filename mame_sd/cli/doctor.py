"""Report what this machine can do: versions, device, attention, the model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from mame_sd.cli.console import answer, doing
from mame_sd.compat import NAMES, complaint
from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError, first_line
from mame_sd.runs.devices import pick_device
from mame_sd.runs.model_files import ModelChoice

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "pillow")


@dataclass(frozen=True)
class Check:
    """One line of the report: what was checked, what was found, and what to do.

    A "note" works, but slowly or in part. `bad_input` is due to the input, not to the machine.
    """

    name: str
    state: Literal["ok", "note", "fail"]
    detail: str
    bad_input: bool = False


def examine(choice: ModelChoice) -> list[Check]:
    """Run every check. Nothing is downloaded unless `choice` names a hub model."""
    with doing("examining this machine and the model"):
        first = _guarded("device", lambda: _device(pick_device(choice.device)))
        if first.state == "fail":
            choice = replace(choice, device="cpu")
        device = pick_device(choice.device)
        return [
            *_versions(),
            first,
            _guarded("attention", lambda: _attention(device)),
            _guarded("model", lambda: _model(choice)),
        ]


def print_checks(checks: Sequence[Check]) -> None:
    """Print one line for each check, and raise UserError or MachineError if one failed."""
    width = max(len(check.name) for check in checks)
    lines = [f"{check.state:<4}  {check.name:<{width}}  {check.detail}" for check in checks]
    answer("\n".join(lines), {"checks": [asdict(check) for check in checks]})
    for check in checks:
        if check.bad_input:
            raise UserError(check.detail)
    if failed := ", ".join(check.name for check in checks if check.state == "fail"):
        raise MachineError(f"some checks failed ({failed}); the lines above say what to do")


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (UserError, TypeError, ValueError) as error:
        return Check(name, "fail", str(error), bad_input=True)
    except MachineError as error:
        return Check(name, "fail", str(error))
    except Exception as error:  # a device may raise anything
        return Check(name, "fail", f"{type(error).__name__}: {first_line(error)}")


def _versions() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for name in ("mame-sd", *PACKAGES):
        try:
            version = importlib.metadata.version(name)
            lacks = complaint(name) if name in NAMES else ""
            yield Check(name, "fail" if lacks else "ok", lacks or version)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "fail", f"missing; pip install {name}")


def _device(device: torch.device) -> Check:
    if device.type == "cpu":
        cores = f"{torch.get_num_threads()} of {os.cpu_count()} cores (OMP_NUM_THREADS sets them)"
        return Check("device", "note", f"cpu, {cores}: large models will be slow")
    if device.type != "cuda":
        return Check("device", "ok", str(device))
    free, total = (count >> 20 for count in torch.cuda.mem_get_info(device))
    name = torch.cuda.get_device_name(device)
    return Check("device", "ok", f"{device}, {name}, {free} of {total} MiB free")


def _attention(device: torch.device) -> Check:
    """Name the kernels that run, and compare attention with a bias with the formula."""
    from mame_sd.core.min_tokens import UNFUSED, backend_of, kernel_of

    dtype = torch.float32 if device.type == "cpu" else torch.float16
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 320, 64, generator=generator).to(device, dtype)
    bias = torch.rand(1, 1, 1, 320, generator=generator).to(device, dtype)
    kernel = kernel_of(device, dtype)
    without, masked = (
        kernel.kind if backend is None else backend.name.lower().removesuffix("_attention")
        for backend in (backend_of(q), backend_of(q, bias))
    )
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    q, k, v, bias, output = (t.cpu().double() for t in (q, k, v, bias, output))
    wanted = (q @ k.mT / 8 + bias).softmax(-1) @ v
    apart = float((output - wanted).norm() / wanted.norm())
    if not apart < 100 * torch.finfo(dtype).eps:
        raise MachineError(
            f"attention with a bias: expected the formula's output, got one off by {apart:.1e};"
            " update PyTorch, or give a kernel without a bias (docs/kernels.md)"
        )
    said = (
        f"{without}, with a bias {masked} (off by {apart:.0e}); layers merge from"
        f" {kernel.least:,} tokens on by default"
    )
    if kernel.kind != UNFUSED or device.type == "cpu":
        return Check("attention", "ok", said)
    if device.type == "mps":
        return Check("attention", "note", f"{said}; torch 2.13 has fused kernels for MPS")
    switch = "set TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1" if torch.version.hip else "update it"
    return Check(
        "attention", "note", f"{said}; PyTorch has no fused kernel here, {switch} before you merge"
    )


def _model(choice: ModelChoice) -> Check:
    """Load the model as `generate` would, and count what can merge."""
    from mame_sd.diffusion.apply_denoiser import build_handle
    from mame_sd.runs.loading import load_model

    pipe = load_model(choice).pipe
    layers = len(build_handle(pipe, MaMeConfig()).report().layers)
    said = f"{choice.name}, {type(pipe).__name__}, {layers} self-attentions may merge"
    return Check("model", "ok", said)
