"""What this machine can do: versions, device, fused attention, the model, and what would fail."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from mame_sd.cli.errors import EXTRAS
from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError, first_line
from mame_sd.runs.devices import pick_device
from mame_sd.runs.model_files import ModelChoice, find_model
from mame_sd.upstream import NAMES, complaint

NEEDED = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "pillow",
    "typer",
    "rich",
)
FUSED_KERNELS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
FREE_DISK = 1 << 30  # bytes below which a run may not have room


@dataclass(frozen=True)
class Check:
    """One line of the report: "ok", "note" (works, but) or "fail" (something that would fail).

    `bad_input`: it fails because of what was asked for, not because of the machine.
    """

    name: str
    state: Literal["ok", "note", "fail"]
    detail: str
    bad_input: bool = False


def examine(choice: ModelChoice) -> list[Check]:
    """Run every check. Nothing is downloaded unless `choice` names a hub model."""
    checks = [*_versions(), _device(choice)]
    for name, check in (
        ("fused attention", fused_attention),
        ("merging", _merging),
        ("float16", _half),
    ):
        checks.append(_guarded(name, check, choice))
    usable = next(check for check in checks if check.name == "device").state != "fail"
    return [
        *checks,
        _model(choice, choice.device if usable else "cpu"),
        _lora(),
        *_extras(),
        _threads(),
        _disk(),
    ]


def print_checks(checks: Sequence[Check]) -> None:
    """One line a check on stdout. Raises UserError or MachineError when one failed."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.state:<4}  {check.name:<{width}}  {check.detail}")
    for check in checks:
        if check.bad_input:
            raise UserError(check.detail)
    failed = [check.name for check in checks if check.state == "fail"]
    if failed:
        raise MachineError(
            f"some checks failed ({', '.join(failed)}); the lines above say what to do"
        )


def _guarded(name: str, check: Callable[[torch.device], str | Check], choice: ModelChoice) -> Check:
    try:
        found = check(pick_device(choice.device))
        return found if isinstance(found, Check) else Check(name, "ok", found)
    except UserError as error:
        return Check(name, "fail", str(error), bad_input=True)
    except Exception as error:  # whatever a device may raise is the finding
        return Check(name, "fail", f"{type(error).__name__}: {first_line(error)}")


def _versions() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for name in ("mame-sd", *NEEDED):
        try:
            version = importlib.metadata.version(name)
            lacks = complaint(name) if name in NAMES else ""
            yield Check(name, "fail" if lacks else "ok", lacks or version)
        except importlib.metadata.PackageNotFoundError:
            missing = (
                "running from a folder, not installed"
                if name == "mame-sd"
                else f"missing; pip install {name}"
            )
            yield Check(name, "note" if name == "mame-sd" else "fail", missing)


def _device(choice: ModelChoice) -> Check:
    try:
        device = pick_device(choice.device)
    except UserError as error:
        return Check("device", "fail", str(error), bad_input=True)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Check(
            "device",
            "ok",
            f"{device}, {torch.cuda.get_device_name(device)}, {free >> 20} of {total >> 20} MiB"
            " free",
        )
    slow = device.type == "cpu"
    return Check(
        "device",
        "note" if slow else "ok",
        f"{device}{', no GPU found: large models will be slow' if slow else ''}",
    )


def fused_attention(device: torch.device, kernels: Sequence[str] = FUSED_KERNELS) -> Check:
    """Which of the fused `kernels` run on the device; a note when none does."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = torch.float16 if device.type == "cuda" else torch.float32
    q = torch.ones(1, 1, 64, 64, device=device, dtype=dtype)
    names = []
    for kernel in kernels:
        try:
            with sdpa_kernel([getattr(SDPBackend, kernel)]):
                torch.nn.functional.scaled_dot_product_attention(q, q, q)
            names.append(kernel.removesuffix("_ATTENTION").lower())
        except RuntimeError:
            continue
    if not names:
        return Check(
            "fused attention", "note", "none: attention runs unfused, slower and with more memory"
        )
    return Check("fused attention", "ok", ", ".join(names))


def _merging(device: torch.device) -> str:
    from mame_sd.core.attention import attention
    from mame_sd.core.paper import plan_tokens

    x = torch.ones(1, 64, 8, device=device)
    plan = plan_tokens(x, MaMeConfig(tau=0.8))
    if plan.tokens_kept != 32 or not torch.allclose(plan.restore(plan.merge(x)), x, atol=1e-3):
        raise RuntimeError(f"64 equal tokens came back changed, {plan.tokens_kept} kept")
    q = x.unsqueeze(1)
    if not torch.allclose(attention(q, q, q, (8, 8), keep=0.25), q, atol=1e-3):
        raise RuntimeError("attention over merged keys of 64 equal tokens gave others")
    return "64 equal tokens become 32 and come back; attention over 16 merged keys agrees"


def _half(device: torch.device) -> str:
    x = torch.ones(8, 8, device=device, dtype=torch.float16)
    torch.nn.functional.conv2d(x[None, None], x[None, None]).sum().item()
    return f"works on {device}" + (", but slowly" if device.type == "cpu" else "")


def _model(choice: ModelChoice, device: str) -> Check:
    """Load the model as `generate` would, read every weight, and count what can merge."""
    from mame_sd.diffusion.apply_denoiser import build_handle
    from mame_sd.runs.loading import load_model

    try:
        path, name = find_model(choice)
        model = load_model(replace(choice, device=device))
        bad = _not_finite(model.pipe)
        if bad is not None:
            raise UserError(
                f"--model {name}: expected weights that are finite numbers, got others in {bad};"
                " get the model again"
            )
        layers = len(build_handle(model.pipe, MaMeConfig()).report().layers)
    except MachineError as error:
        return Check("model", "fail", str(error))
    except (UserError, TypeError, ValueError) as error:
        return Check("model", "fail", str(error), bad_input=True)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 2**20
    return Check(
        "model",
        "ok",
        f"{name}, {type(model.pipe).__name__}, {size:.0f} MiB, {layers} self-attentions may merge",
    )


def _not_finite(pipe: Any) -> str | None:
    """The name of the first weight that holds NaN or infinity."""
    for part, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            for name, weight in component.named_parameters():
                if (
                    weight.element_size() > 1 and not torch.isfinite(weight).all()
                ):  # 8-bit types have no such test
                    return f"{part}.{name}"
    return None


def _lora() -> Check:
    try:
        return Check("LoRA", "ok", f"peft {importlib.metadata.version('peft')}")
    except importlib.metadata.PackageNotFoundError:
        return Check("LoRA", "note", "--lora would fail without peft; pip install peft")


def _extras() -> Iterator[Check]:
    """Commands that a plain installation lacks packages for."""
    for name, command, packages in (
        (
            "mame-sd-eval",
            "mame-sd-eval benchmark, classify and report",
            ("matplotlib", "jinja2", "torchmetrics"),
        ),
        ("mame-sd ui", "mame-sd ui", ("gradio",)),
    ):
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        extra = EXTRAS[packages[0]]
        fix = f"{command} would fail without {', '.join(missing)}; pip install 'mame-sd[{extra}]'"
        yield Check(name, "note", fix) if missing else Check(name, "ok", f"{', '.join(packages)}")


def _threads() -> Check:
    return Check(
        "threads",
        "ok",
        f"{torch.get_num_threads()} of {os.cpu_count()} cores (OMP_NUM_THREADS sets them)",
    )


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    state: Literal["ok", "note"] = "ok" if free >= FREE_DISK else "note"
    return Check(
        "disk",
        state,
        f"{free / 2**30:.1f} GiB free here{'' if state == 'ok' else ', a run may not have room'}",
    )
