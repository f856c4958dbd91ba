"""A pytest plugin for diffusers' own tests: models merge from the moment that they are made.

`MAME_MODE` says how (`suites.MODES`), `MAME_BACKEND` what `torch.compile` compiles with.
`MAME_RESULTS` is a file of outcomes, one JSON line a test. Tests that it holds already are left
out, so that a run can be stopped and resumed. The plugin loads before diffusers' models, whose
classes it changes as they are defined. Tests know nothing of it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.modeling_utils import ModelMixin

SETTINGS: dict[str, Any] = {"keep": 0.5, "min_tokens": 1}
# of the weights of queries and of keys: scores of 16 times the size, so that tiny random models
# attend
SCALE = 4.0
MODE, RESULTS = os.environ["MAME_MODE"], Path(os.environ["MAME_RESULTS"])
_handles: list[Any] = []
_tests: dict[str, dict[str, Any]] = {}
_models: list[str] = []


def install(model: Any) -> None:
    """Puts on what the mode asks for; models that have nothing to merge, or are refused, stay as
    they are.
    """
    from mame_sd import MaMeAttnProcessor, apply_mame

    try:
        if MODE in ("off", "on", "scaled"):
            handle = apply_mame(model, **SETTINGS)
            handle.active = MODE != "off"
            _handles.append(handle)
        elif MODE == "processor" and hasattr(model, "set_attn_processor"):
            apply_mame(model, **SETTINGS).remove()  # whether there is anything to merge
            model.set_attn_processor(MaMeAttnProcessor(**SETTINGS))
        else:
            return
        _models.append(type(model).__name__)
    except ValueError:
        pass


@torch.no_grad()
def scale(model: Any) -> None:
    for module in model.modules():
        for name in ("to_q", "to_k"):
            weight = getattr(getattr(module, name, None), "weight", None)
            if weight is not None:
                weight.mul_(SCALE)


def made(kind: type) -> None:
    """Lets objects of `kind` be treated once its __init__ has run."""
    init: Any = kind.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self).__init__ is __init__ and not any(p.is_meta for p in self.parameters()):
            if MODE.startswith("scaled"):
                scale(self)
            install(self)

    kind.__init__ = __init__  # type: ignore[misc]


def loaded(name: str) -> None:
    """Lets models be treated once the classmethod `name` has loaded their weights."""
    own = getattr(ModelMixin, name).__func__

    @functools.wraps(own)
    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(cls, *args, **kwargs)
        install(result[0] if isinstance(result, tuple) else result)
        return result

    setattr(ModelMixin, name, classmethod(load))


def patch_models() -> None:
    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        super(ModelMixin, cls).__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            made(cls)

    ModelMixin.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    loaded("from_pretrained")


def patch_pipeline() -> None:
    """StableDiffusionPipeline is ours, with the same settings."""
    import diffusers

    from mame_sd.pipelines import StableDiffusionMaMePipeline

    init: Any = StableDiffusionMaMePipeline.__init__
    names = list(inspect.signature(init).parameters)[-len(init.__defaults__) :]
    ours = {
        "tau": None,
        "keep": SETTINGS["keep"],
        "mame_config": {"min_tokens": SETTINGS["min_tokens"]},
    }
    init.__defaults__ = tuple(
        ours.get(name, value) for name, value in zip(names, init.__defaults__, strict=True)
    )
    diffusers.StableDiffusionPipeline = StableDiffusionMaMePipeline


def pytest_configure(config: pytest.Config) -> None:
    backend = os.environ.get("MAME_BACKEND")
    if backend:
        torch.compile = functools.partial(torch.compile, backend=backend)  # type: ignore[assignment]
    if MODE == "pipeline":
        patch_pipeline()
    elif MODE != "without":
        patch_models()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Compile tests run on a CPU too: what they ask for is a device that diffusers' own CI compiles
    on.
    """
    done = (
        {json.loads(line)["test"] for line in RESULTS.open(encoding="utf-8")}
        if RESULTS.is_file()
        else set()
    )
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]
    for item in items:
        if os.environ.get("MAME_BACKEND") and item.get_closest_marker("compile"):
            for node in item.listchain():
                node.own_markers = [
                    m for m in node.own_markers if "accelerator" not in str(m.kwargs.get("reason"))
                ]


def merged_tokens() -> int:
    """Tokens that the layers of this test's models went without, over all calls."""
    total = 0
    for handle in _handles:
        for hook in handle._layers:
            try:
                _, tokens_in, kept = hook.stats.totals()
                total += tokens_in - kept
            except (
                RuntimeError,
                NotImplementedError,
            ):  # counters of a model that lies on no device
                continue
    return total


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    test = _tests.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed"})
    if report.failed or report.skipped:
        test["outcome"] = "skipped" if report.skipped else "failed"
        text = (
            report.longrepr[2]
            if report.skipped and isinstance(report.longrepr, tuple)
            else str(report.longrepr)
        )
        errors = [
            line[1:].strip() for line in text.splitlines() if line.startswith("E ")
        ] or text.splitlines()[-1:]
        test["error"] = " ".join(errors[:3])[:300]
    if report.when == "call":
        test["merged"], test["models"] = merged_tokens(), sorted(set(_models))
    if report.when == "teardown":
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_tests.pop(report.nodeid)) + "\n")
        _handles.clear()
        _models.clear()
