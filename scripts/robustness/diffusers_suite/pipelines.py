"""The tiny pipelines of diffusers' own tests, each run unmerged, with `tau=1` and merged:

    python -m scripts.robustness.diffusers_suite --pipelines [--source CHECKOUT]

For each class of pipeline one JSON line is written to a file. Those that it has are left out, so
that a run can be stopped and resumed. `__main__.py` runs this module in the folder of the tests,
which are the package `tests` there. Stand-ins for models of the hub lie in it.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

SECONDS = 40  # of processor time for one pipeline
AREA = 64 * 64  # of reference images, which edits bring to a megapixel
QWEN = "hf-internal-testing/tiny-random-Qwen2VLForConditionalGeneration"
PROCESSORS = ("AutoProcessor", "Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
CLOSE = 2e-3  # of the largest value: rounding, after two or more steps


def name_operators() -> None:
    """Lets torchvision's wheel for graphics cards be imported beside PyTorch for a processor.

    Its operators can't be loaded there. None is called here, but each must have a name.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        pass


def configurations(module: ModuleType) -> Iterator[Any]:
    """The classes of tests in a module that can build a pipeline."""
    for _, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ == module.__name__ and hasattr(kind, "get_dummy_components"):
            yield kind


def values(output: Any) -> np.ndarray[Any, Any]:
    """All numbers of a pipeline's first output: tensors, arrays or pictures, in lists or not."""
    if isinstance(output, torch.Tensor):
        return output.detach().float().flatten().numpy()
    if isinstance(output, list | tuple):
        return np.concatenate([values(part) for part in output])
    return np.asarray(output, dtype=np.float64).ravel()


class Processor:
    """What encodes prompts for a language model that sees, without its pictures.

    Those of transformers need torchvision. Merging sees the encoder's states alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.image_processor = tokenizer, SimpleNamespace()
        self.image_token, self.image_token_id = "<|image_pad|>", 995

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Processor:
        """A stand-in's tokenizer: that of Qwen, whichever processor is asked for."""
        return cls(transformers.AutoTokenizer.from_pretrained(QWEN))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: Any = None, images: Any = None, **options: Any) -> Any:
        names = ("padding", "max_length", "truncation", "return_tensors", "padding_side")
        given = {name: options[name] for name in names if name in options}
        return transformers.BatchFeature(
            {**self.tokenizer(text, **given), "pixel_values": None, "image_grid_thw": None}
        )


class Tried:
    """One pipeline of a class of tests. `larger` doubles the sides of what it makes that often."""

    def __init__(self, tests: Any, larger: int = 0) -> None:
        self.tests, self.larger = tests, larger
        reduce_references(sys.modules[tests.pipeline_class.__module__])
        torch.manual_seed(0)
        self.pipe = tests.pipeline_class(**tests.get_dummy_components())
        for part in self.pipe.components.values():
            if isinstance(part, torch.nn.Module):
                fill_zeros(part.eval())
        self.pipe.set_progress_bar_config(disable=True)

    def run(self) -> np.ndarray[Any, Any]:
        names = inspect.signature(self.tests.get_dummy_inputs).parameters
        inputs = self.tests.get_dummy_inputs(*(["cpu"] if "device" in names else []))
        for side in ("height", "width"):
            if isinstance(inputs.get(side), int):
                inputs[side] *= 2**self.larger
        torch.manual_seed(0)
        with torch.no_grad():
            return values(self.pipe(**inputs)[0])


@torch.no_grad()
def fill_zeros(module: torch.nn.Module) -> None:
    """Draws parameters that begin as zeros: gates that shut would hide what attention gives."""
    for parameter in module.parameters():
        if not parameter.any():
            parameter.normal_(std=0.1)


def reduce_references(module: Any) -> None:
    """Lets an edit's pipeline work with small reference images."""
    own = getattr(module, "calculate_dimensions", None)
    if own is not None and not hasattr(own, "of_area"):

        def smaller(area: int, *args: Any) -> Any:
            return own(min(area, AREA), *args)

        smaller.of_area = AREA  # type: ignore[attr-defined]
        module.calculate_dimensions = smaller


def tried(kind: type) -> dict[str, Any]:
    """What merging does in the pipeline of a class of tests, and why nothing, if nothing merges."""
    from mame_sd import apply_mame, remove_mame

    tests: Any = kind()
    try:
        case = Tried(tests)
    except Exception as error:
        return {"outcome": "not built", "why": described(error)}
    try:
        handle = apply_mame(case.pipe, keep=0.5, min_tokens=1)
        remove_mame(case.pipe)
    except (TypeError, ValueError) as error:
        return {"outcome": "refused", "why": described(error)}
    try:
        before = case.run()
    except Exception as error:
        return {"outcome": "not run", "why": described(error)}
    for larger in range(4):
        if larger:  # too few tokens to merge
            try:
                case = Tried(tests, larger)
                before = case.run()
            except Exception:
                break
        handle = apply_mame(case.pipe, keep=0.5, min_tokens=1)
        merged = case.run()
        try:
            layers = handle.report().layers
        except RuntimeError as error:  # it says why nothing merged
            why = described(error)
            continue
        names = [layer.name for layer in layers if layer.tokens_kept < layer.tokens_in]
        if not names or np.array_equal(merged, before):
            why = "too few tokens" if not names else "the output shows nothing of attention"
            continue
        apply_mame(case.pipe, tau=1.0, min_tokens=1)
        apart = np.abs(case.run() - before).max()
        found = {
            "layers": len(layers),
            "merged": len(names),
            "denoisers": denoisers(case.pipe, names),
            "finite": bool(np.isfinite(merged).all()),
            "equal": bool(apart <= CLOSE * max(1.0, np.abs(before).max())),
        }
        return {"outcome": "merged" if found["finite"] and found["equal"] else "wrong", **found}
    return {"outcome": "left", "why": why}


def denoisers(pipe: Any, names: list[str]) -> list[str]:
    """The denoisers of a pipeline in which layers of these names merge."""
    from mame_sd.diffusion.apply_denoiser import denoiser_of

    root = denoiser_of(pipe)
    if isinstance(root, torch.nn.ModuleDict):
        return sorted({name.partition(".")[0] for name in names})
    return [name for name, part in pipe.components.items() if part is root]


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:400]


@contextmanager
def limited() -> Iterator[None]:
    """Raises TimeoutError where the block takes more than SECONDS of processor time."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(results: Path, folders: list[str]) -> None:
    """Tries every pipeline below the folders that `results` has not yet."""
    name_operators()
    for name in PROCESSORS:
        getattr(transformers, name).from_pretrained = Processor.from_pretrained
    known = set()
    if results.is_file():
        lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
        known = {line["tests"] for line in lines}
    root = Path("tests/pipelines")
    for path in (path for name in folders for path in sorted((root / name).rglob("test_*.py"))):
        try:
            module = importlib.import_module(".".join(path.with_suffix("").parts))
        except Exception as error:
            print(f"{path}: {described(error)}", flush=True)
            continue
        for kind in configurations(module):
            pipeline = getattr(kind, "pipeline_class", None)
            if not isinstance(pipeline, type):
                continue
            maker = kind.get_dummy_components.__qualname__.partition(".")[0]
            name = f"{path.as_posix()}::{maker}, {pipeline.__name__}"  # several classes share one
            if name in known:
                continue
            known.add(name)
            try:
                with limited(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = tried(kind)
            except Exception as error:
                traceback.print_exc()
                found = {"outcome": "failed", "why": described(error)}
            line = {"pipeline": pipeline.__name__, "tests": name, **found}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
            gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["."])
