"""All classes of diffusers that may denoise, and what `apply_mame` makes of each."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from mame_sd import NothingMergedError, apply_mame
from mame_sd.diffusion.families.transformers import family_of
from tests.matrix.models.case import Case
from tests.matrix.models.registry import CASES
from tests.matrix.models.restored import SETTINGS, restored_of

RECORD = Path(__file__).parent / "sweep.json"
ROOMS = ("models.transformers", "models.unets", "models.controlnets", "diffusion_decoder")
# No denoisers: several ControlNets as one, and parts of one.
PARTS = {"ControlNetXSAdapter", "MotionAdapter"}


def classes() -> set[str]:
    """Names of the models of diffusers that may denoise."""
    kinds = {name: getattr(diffusers.models, name) for name in dir(diffusers.models)}
    return {
        name
        for name, kind in kinds.items()
        if inspect.isclass(kind)
        and issubclass(kind, diffusers.ModelMixin)
        and any(room in kind.__module__ for room in ROOMS)
        and "Multi" not in name
    } - PARTS


def outcome(case: Case, model: nn.Module) -> dict[str, Any]:
    """Return which layers merge by `keep` and by `tau`, and what is restored. `keep` stays on."""
    restored = {kind: restored_of(case, model, kind) for kind in SETTINGS}
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    found: dict[str, Any] = {}
    with torch.no_grad():
        model(**case.inputs())
    layers = handle.report().layers
    merged = [layer.name for layer in layers if layer.merged]
    counts = Counter(round(layer.tokens_in) for layer in layers if layer.merged)
    found["layers"] = {str(tokens): n for tokens, n in sorted(counts.items(), reverse=True)}
    found["left"] = len(layers) - len(merged)
    handle.set(tau=-1.0)
    handle.reset()
    with torch.no_grad():
        model(**case.inputs())
    try:
        found["tau"] = [x.name for x in handle.report().layers if x.merged] == merged
    except NothingMergedError:
        found["tau"] = False
    handle.set(keep=0.5)
    handle.reset()
    families = {family.name for family in map(family_of, model.modules()) if family is not None}
    found["family"] = ", ".join(sorted(families))
    return found | restored


def tensors_of(model: nn.Module, case: Case) -> list[Tensor]:
    """All tensors that a call gives."""
    with torch.no_grad():
        output = model(**case.inputs())
    return flat(output if isinstance(output, tuple | list | Tensor) else list(output.values()))


def flat(value: Any) -> list[Tensor]:
    """Return the tensors in what a call takes or gives."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in flat(part)] if isinstance(value, tuple | list) else []


def sweep() -> None:
    """Run every case and write the record."""
    record = {}
    for case in CASES:
        model = case.build().eval()
        record[case.name] = outcome(case, model)
        print(f"{case.name}: {record[case.name]}", flush=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
