"""All that one run on a graphics card can tell, the most valuable first, in at most 8 minutes.

    python -m scripts.device_run --out out/device         # on the card, in a checkout
    python -m scripts.device_run --device cpu --tiny      # a rehearsal, in seconds

It needs torch and diffusers; nothing is fetched, and models have random weights. Each result is a
line of OUT/results.jsonl as soon as it is there, so that a stop loses nothing; at the end
OUT/results.json has all of them, and a table is printed. A step that fails, takes longer than its
budget or breaks the card's context costs no more than its own time: the run goes on behind it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

from benchmarks import gpu
from benchmarks.attention import without_bias
from benchmarks.gpu import Case
from mame_sd import apply_mame, attention
from mame_sd.core.merge_keys import Grid, KeyMerging, merge_keys
from mame_sd.core.min_tokens import kernel_of
from mame_sd.core.restore import restored as restored_all

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 480  # of a whole run
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# How far from float64 attention may be, of the norm: some 100 roundings of the dtype.
NEAR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
BACKENDS = {  # diffusers' name, and PyTorch's where its own attention takes it
    "native": ("native", None),
    "flash": ("_native_flash", SDPBackend.FLASH_ATTENTION),
    "cudnn": ("_native_cudnn", SDPBackend.CUDNN_ATTENTION),
}
ROWS = ("unmerged", "default", "keep .25", "keep .125", "keep .25, without bias")
# Settings of restoring, each at any number of tokens.
RESTORED: dict[str, dict[str, float]] = {
    "mlp .125": {"keep": 1, "mlp_keep": 0.125},
    "mlp .25": {"keep": 1, "mlp_keep": 0.25},
    "block .25": {"keep": 1, "block_keep": 0.25},
    "block .25, keep .25": {"keep": 0.25, "block_keep": 0.25},
    "mlp .125, keep .25": {"keep": 0.25, "mlp_keep": 0.125},
}
MODELS = (
    "SD 1.5 at 512",
    "SDXL at 1024",
    "SD 1.5 at 1024",
    "FLUX.1 at 1024",
    "SD 3.5 large at 1024",
    "Wan 2.1 14B, 480p",
)
RESTORED_MODELS = (
    "FLUX.1 at 1024",
    "SD 3.5 large at 1024",
    "FLUX.1 at 2048",
    "SDXL at 1024",
    "Wan 2.1 14B, 480p",
)


@dataclass
class Run:
    """What is measured on which device, and the lines it gives.

    Attributes:
        out: the folder of the results.
        device: where.
        tiny: sizes for a rehearsal.
        begun: when the run began, by `time.time`.
        seconds: how long it may take.
        step: the step that runs.
        lines: what was found.
    """

    out: Path
    device: torch.device
    tiny: bool = False
    begun: float = field(default_factory=time.time)
    seconds: float = SECONDS
    step: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.seconds - (time.time() - self.begun)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def least(self) -> int:
        """The min_tokens of rows that merge all large layers."""
        return 16 if self.tiny else 1024

    def note(self, what: str, **found: Any) -> None:
        """Writes one line."""
        line = {
            "step": self.step,
            "what": what,
            "at_s": round(time.time() - self.begun, 1),
            **found,
        }
        self.lines.append(line)
        with open(self.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line)[:400], flush=True)

    def wait(self) -> None:
        """Until the device has done what it was asked for."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], Any], rounds: int = 5, each: int = 1) -> list[float]:
        """Of each of `rounds` times `each` calls, the device idle before and after."""
        found = []
        for _ in range(1 if self.tiny else rounds):
            self.wait()
            start = time.perf_counter()
            for _ in range(each):
                call()
            self.wait()
            found.append(1e3 * (time.perf_counter() - start) / each)
        return found

    def milli(self, call: Callable[[], Any], rounds: int = 5, each: int = 1) -> float:
        """The median of these, after one call that doesn't count."""
        call()
        return round(statistics.median(self.milliseconds(call, rounds, each)), 4)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:250]}"


def machine(run: Run) -> None:
    """The device, and what it reaches: products, memory, launches."""
    kernel = kernel_of(run.device, torch.bfloat16)
    found: dict[str, Any] = {
        "torch": str(torch.__version__), "diffusers": diffusers.__version__,
        "python": platform.python_version(), "kind": ", ".join(kernel), "min_tokens": kernel.least,
    }  # fmt: skip
    if run.is_cuda:
        seen = torch.cuda.get_device_properties(run.device)
        found |= {"device": seen.name, "capability": f"{seen.major}.{seen.minor}"}
        found |= {"processors": seen.multi_processor_count, "memory_gb": seen.total_memory / 2**30}
    run.note("machine", **found)
    side, dtype = (64, torch.float32) if run.tiny else (8192, torch.bfloat16)
    a = torch.randn(side, side, device=run.device, dtype=dtype)
    b = a.clone()
    small = torch.zeros(8, device=run.device)
    run.note(
        "reached",
        product_tflops=round(2 * side**3 / run.milli(lambda: a @ b, 5, 5) / 1e9, 1),
        copy_tbs=round(2 * a.nbytes / run.milli(lambda: b.copy_(a), 5, 20) / 1e9, 3),
        launch_us=round(1e3 * run.milli(lambda: small.add_(1), 5, 500), 2),
    )


def is_near(run: Run, dtype: torch.dtype) -> None:
    """`mame_sd.attention` on the device beside float64 on the processor, from the same numbers."""
    size = (12, 20) if run.tiny else (40, 56)
    heads, width, before, after = 2, 16 if run.tiny else 64, 3, 7
    generator = torch.Generator().manual_seed(0)
    count = before + size[0] * size[1] + after
    given = [torch.randn(2, heads, count, width, generator=generator).to(dtype) for _ in range(3)]
    for name, more in {
        "attention": {},
        "means": {"fit_queries": 0},
        "half of them, one tile": {"keep": 0.5, "tile_size": 0},
        "drawn, led": {"draw": torch.tensor([5]), "leader": torch.tensor([1, 1])},
    }.items():
        there = {n: v.to(run.device) if isinstance(v, Tensor) else v for n, v in more.items()}
        found = attention(*(t.to(run.device) for t in given), size, before, after, **there).cpu()
        want = attention(*(t.double() for t in given), size, before, after, **more)
        apart = float((found.double() - want).norm() / want.norm())
        run.note("near", case=name, dtype=str(dtype), apart=apart, right=apart < NEAR[dtype])


def restored_is_near(run: Run) -> None:
    """Restored MLPs on the device and on the processor in float64, from the same numbers."""
    size = (12, 20) if run.tiny else (40, 56)
    torch.manual_seed(0)
    coarse = torch.randn(2, 64, size[0] // 4, size[1] // 4)
    x = F.interpolate(coarse, size, mode="bilinear").flatten(2).transpose(1, 2)
    x = x + 0.1 * torch.randn(x.shape)
    mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).requires_grad_(False)
    for keep in (0.125, 0.25):
        for dtype in DTYPES:
            rounded, given = copy.deepcopy(mlp).to(dtype), x.to(dtype)
            want = restored_all(rounded.double(), given.double(), size, keep)
            there = rounded.to(run.device, dtype)
            found = restored_all(there, given.to(run.device), size, keep).cpu()
            apart = _apart(found.double(), want)
            run.note(
                "near", case=f"MLP on {keep}", dtype=str(dtype), apart=apart,
                right=apart < NEAR[dtype],
            )  # fmt: skip


def layers_are_near(run: Run) -> None:
    """A merged UNet layer and SD3 block: no farther from the unmerged one in float64 than the
    merged one in float64 is, but for rounding. (Which keys merge may differ where two destinations
    are nearly as near.)
    """
    size, heads = ((8, 12), 2) if run.tiny else ((48, 40), 8)
    block = gpu.sd3(size, heads, text=20, layers=1, dtype=torch.float64)
    torch.manual_seed(0)
    attn = Attention(query_dim=40 * heads, heads=heads, dim_head=40).double().eval()
    hidden = torch.randn(2, size[0] * size[1], 40 * heads, dtype=torch.float64)
    model = block.build(torch.device("cpu"))
    for kind, module, (args, named), how in (
        ("UNet layer", attn, ((hidden,), {}), {"size": size}),
        ("SD3 block", model, ((), random_inputs(block, model)), {}),
    ):

        def of(
            merged: bool,
            device: torch.device,
            dtype: torch.dtype,
            module: nn.Module = module,
            given: Any = (args, named),
            how: dict[str, Any] = how,
        ) -> Tensor:
            own = copy.deepcopy(module).to(device, dtype)
            args, named = tree_map(
                lambda v: v.to(device, dtype) if isinstance(v, Tensor) else v, given
            )
            on = apply_mame(own, keep=0.25, min_tokens=16, **how) if merged else nullcontext()
            with on as handle:
                output = own(*args, **named)
                assert handle is None or any(x.share < 1 for x in handle.report().layers)
            output = output if isinstance(output, Tensor) else output[0]
            return output.double().cpu()

        plain = of(False, torch.device("cpu"), torch.float64)
        there = _apart(of(True, torch.device("cpu"), torch.float64), plain)
        for dtype in DTYPES:
            rounding = _apart(of(False, run.device, dtype), plain)
            apart = _apart(of(True, run.device, dtype), plain)
            run.note(
                "near", case=kind, dtype=str(dtype), apart=apart, in_float64=there,
                rounding=rounding, right=apart < 1.1 * there + 4 * rounding < 1,
            )  # fmt: skip


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def random_inputs(case: Case, model: nn.Module) -> dict[str, Any]:
    """Arguments of a call with random numbers: products of zeros are faster."""
    named, _ = case.inputs(model)
    generator = torch.Generator().manual_seed(1)
    for name, value in named.items():
        if isinstance(value, Tensor) and "ids" not in name and "timestep" not in name:
            named[name] = torch.randn(value.shape, generator=generator).to(value)
    return named


SIDES = (32, 64, 128, 256)  # of images with 1k to 64k tokens


def attention_alone(run: Run) -> None:
    """Milliseconds of attention over all keys, and of the merging and attention over a share."""
    shapes = {"UNet": (2, 10, 64, torch.float16), "transformer": (1, 24, 128, torch.bfloat16)}
    for kind, (batch, heads, width, dtype) in shapes.items():
        for side in (8,) if run.tiny else SIDES:
            dtype = torch.float32 if run.tiny else dtype
            q, k, v = torch.randn(
                3, batch, heads, side * side, width, device=run.device, dtype=dtype
            )
            found: dict[str, Any] = {}
            for name, (_, backend) in BACKENDS.items():
                try:
                    found[name] = [
                        run.milli(partial(_by, backend, q, k, v, side, keep))
                        for keep in (1, 0.25, 0.125)
                    ]
                except RuntimeError as error:
                    found[name] = first_line(error)
            run.note("attention", case=kind, tokens=side * side, dtype=str(dtype), ms=found)


def _by(backend: Any, q: Tensor, k: Tensor, v: Tensor, side: int, keep: float) -> Tensor:
    """Attention by one of PyTorch's kernels; FlashAttention takes no sizes of groups."""
    bias = None
    if keep < 1:
        counted = backend is not SDPBackend.FLASH_ATTENTION
        grids = [Grid(0, (side, side), keep)]
        merged = merge_keys(q, k, v, grids, KeyMerging(), size_bias=counted)
        k, v, bias = merged.key, merged.value, merged.bias if counted else None
    with sdpa_kernel(backend) if backend else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _sizes(bias: Tensor) -> Callable[..., Tensor]:
    """The score_mod of flex attention that adds bias [B, K] to the logits."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        return score + bias[b, k_at]

    return score_mod


def flex_alone(run: Run) -> None:
    """Milliseconds of attention over a quarter of the keys: with no sizes of groups, with sizes as
    a bias, and with sizes as a score_mod of flex attention.
    """
    of = torch.compile(flex_attention, dynamic=False) if run.is_cuda else flex_attention
    shapes = {"UNet": (2, 10, 64, torch.float16), "transformer": (1, 24, 128, torch.bfloat16)}
    for kind, (batch, heads, width, dtype) in shapes.items():
        for count in (64,) if run.tiny else (4096, 32768):
            dtype = torch.float32 if run.tiny else dtype
            q = torch.randn(batch, heads, count, width, device=run.device, dtype=dtype)
            k, v = torch.randn(2, batch, heads, count // 4, width, device=run.device, dtype=dtype)
            bias = torch.rand(batch, count // 4, device=run.device)

            mask = bias[:, None, None].to(dtype)
            calls = {
                "no sizes": partial(F.scaled_dot_product_attention, q, k, v),
                "bias": partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask),
                "flex": partial(of, q, k, v, score_mod=_sizes(bias)),
            }
            apart = _apart(calls["flex"]().double(), calls["bias"]().double())
            found = {name: run.milli(call) for name, call in calls.items()}
            run.note("flex", case=kind, tokens=count, ms=found, apart=apart, right=apart < 0.02)


def block_alone(run: Run) -> None:
    """Milliseconds of FLUX's double block, unmerged and merged, by diffusers' backends."""
    for side in (8,) if run.tiny else SIDES:
        tiny = {"heads": 2, "text": 7, "dtype": torch.float32} if run.tiny else {}
        case = gpu.flux((side, side), layers=(1, 0), **tiny)
        model = case.build(run.device)
        named = random_inputs(case, model)
        found: dict[str, Any] = {}
        for name, (backend, _) in BACKENDS.items():
            try:
                with attention_backend(backend):
                    found[name] = []
                    for keep in (1, 0.25, 0.125):
                        with _merging(run, model, keep):
                            found[name].append(run.milli(partial(model, **named)))
            except (RuntimeError, ValueError, ImportError) as error:
                found[name] = first_line(error)
        run.note("block", case="FLUX", tokens=side * side, ms=found)


def _merging(run: Run, model: nn.Module, keep: float) -> AbstractContextManager[Any]:
    return nullcontext() if keep == 1 else apply_mame(model, keep=keep, min_tokens=run.least)


def launches(run: Run) -> None:
    """What merging alone asks of the device and of the processor, at sizes of SD 1.5 and FLUX."""
    for kind, side, heads, width in (("SD 1.5", 64, 8, 40), ("FLUX", 64, 24, 128)):
        side, heads = (8, 2) if run.tiny else (side, heads)
        dtype = torch.float32 if run.tiny else torch.float16
        q, k, v = torch.randn(3, 1, heads, side * side, width, device=run.device, dtype=dtype)
        grids = [Grid(0, (side, side), 0.25)]
        call = partial(merge_keys, q, k, v, grids, KeyMerging())
        elapsed = run.milli(call, 10)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * run.is_cuda
        with profile(activities=activities) as seen:
            call()
            run.wait()
        busy = [e for e in seen.key_averages() if e.device_type == DeviceType.CUDA]
        slowest = sorted(busy, key=lambda e: -e.self_device_time_total)[:12]
        run.note(
            "merging", case=kind, tokens=side * side, ms=elapsed,
            kernels=sum(e.count for e in busy),
            busy_us=round(sum(e.self_device_time_total for e in busy), 1),
            slowest=[(e.key[:60], e.count, round(e.self_device_time_total, 1)) for e in slowest],
        )  # fmt: skip


def rows_of(run: Run) -> Mapping[str, Callable[[Any], AbstractContextManager[Any]]]:
    return {
        "unmerged": lambda model: nullcontext(),
        "default": lambda model: apply_mame(model, keep=0.25),
        "keep .25": lambda model: _merging(run, model, 0.25),
        "keep .125": lambda model: _merging(run, model, 0.125),
        "keep .25, without bias": partial(
            apply_mame, keep=0.25, min_tokens=run.least, kernel=without_bias
        ),
    }


def restored_rows(run: Run) -> Mapping[str, Callable[[Any], AbstractContextManager[Any]]]:
    """Return what is put on a model for each row of restoring."""

    def on(model: Any, how: Mapping[str, float]) -> AbstractContextManager[Any]:
        return apply_mame(model, min_tokens=run.least, **how)

    rows = {name: partial(on, how=how) for name, how in RESTORED.items()}
    return {"unmerged": lambda model: nullcontext(), **rows}


def restored(run: Run, name: str, rounds: int = 2) -> None:
    """See `model`, with layers that are restored."""
    model(run, name, restored_rows(run), rounds)


def model(
    run: Run,
    name: str,
    rows: Mapping[str, Callable[[Any], AbstractContextManager[Any]]] | None = None,
    rounds: int = 5,
) -> None:
    """Milliseconds of a forward, eager and as a CUDA graph, interleaved, and its peak of memory."""
    rows = rows_of(run) if rows is None else rows
    case = case_of(run, name)
    built = case.build(run.device).requires_grad_(False)
    named = random_inputs(case, built)
    found: dict[str, dict[str, Any]] = {row: {"eager": [], "graph": []} for row in rows}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def call() -> Any:
        return built(**named)

    for row, on in rows.items():
        with on(built) as handle, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
            if run.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            call()
            run.wait()
            if handle is not None:
                layers = [layer for layer in handle.report().layers if layer.calls]
                merged = sum(layer.share < 1 for layer in layers)
                found[row]["merged"] = f"{merged} of {len(layers)} layers"
            if run.is_cuda:
                found[row]["peak_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                try:
                    graphs[row] = captured(call)
                except RuntimeError as error:
                    found[row]["no graph"] = first_line(error)
                    torch.cuda.synchronize()
        found[row]["said"] = [str(w.message)[:160] for w in said][:2]
    for number in range(1 if run.tiny else rounds):
        for row in list(rows)[:: -1 if number % 2 else 1]:
            with rows[row](built):
                call()
                found[row]["eager"] += run.milliseconds(call, 3)
            if row in graphs:
                found[row]["graph"] += run.milliseconds(graphs[row].replay, 3)
    run.note("model", case=name, rows={row: summary(of) for row, of in found.items()})


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`call` as a CUDA graph, after three calls on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def compiled(run: Run, name: str) -> None:
    """Milliseconds of a forward whose blocks are compiled."""
    case = case_of(run, name)
    found = {}
    for row in ("unmerged", "keep .25"):
        torch._dynamo.reset()
        built = case.build(run.device).requires_grad_(False)
        named = random_inputs(case, built)
        with rows_of(run)[row](built):
            for block in built.modules():
                if type(block).__name__.endswith("TransformerBlock"):
                    block.compile(dynamic=False, backend="eager" if run.tiny else "inductor")
            start = time.time()
            built(**named)
            run.wait()
            took = round(time.time() - start, 1)
            times = run.milliseconds(partial(built, **named), 15)
        found[row] = summary({"compiled": times, "first_s": took})
        del built
    run.note("compiled", case=name, rows=found)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Medians and quartiles in place of lists of times."""
    times = {n: v for n, v in found.items() if n in ("eager", "graph", "compiled")}
    others = {n: v for n, v in found.items() if n not in times}
    for name, values in times.items():
        if values:
            low, middle, high = statistics.quantiles(values * 2, n=4)
            others[f"{name}_ms"] = [round(value, 4) for value in (middle, low, high)]
    return others


TINY: dict[Any, dict[str, Any]] = {  # what makes a case of each kind small, for a rehearsal
    gpu.unet: {
        "side": 64,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "attention_head_dim": 2,
        "transformer_layers_per_block": 1,
    },
    gpu.flux: {"size": (6, 8), "heads": 2, "text": 7},
    gpu.sd3: {"size": (6, 8), "heads": 2, "text": 7},
    gpu.wan: {"size": (2, 4, 8), "heads": 2, "text": 7, "ffn_dim": 64},
}


def case_of(run: Run, name: str) -> Case:
    """The case of that name; in a rehearsal one of its kind."""
    make = gpu.CASES[name]
    return make(**TINY[make.func], dtype=torch.float32) if run.tiny else make()


def tests(run: Run) -> None:
    """The tests marked gpu."""
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    ]
    if not run.is_cuda or not marked:
        run.note("left out", why="no card" if marked else "no tests are marked gpu", tests=marked)
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *marked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    run.note("tests", tests=marked, code=done.returncode, said=done.stdout[-1500:])


STEPS: dict[str, tuple[float, Callable[[Run], None]]] = {  # seconds that each may take
    "machine": (40, machine),
    **{f"near {str(d).split('.')[1]}": (25, partial(is_near, dtype=d)) for d in DTYPES},
    "near layers": (40, layers_are_near),
    "near, restored": (20, restored_is_near),
    **{name: (60, partial(model, name=name)) for name in MODELS[:2]},
    "attention": (45, attention_alone),
    "block": (45, block_alone),
    "launches": (20, launches),
    "flex": (40, flex_alone),
    **{f"{name}, restored": (60, partial(restored, name=name)) for name in RESTORED_MODELS},
    **{name: (60, partial(model, name=name)) for name in MODELS[2:]},
    **{f"{name}, compiled": (75, partial(compiled, name=name)) for name in reversed(MODELS)},
    "tests": (90, tests),
}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """What the models gain, as Markdown: times as fast as unmerged."""
    ways = ("eager", "graph", "compiled")
    heads = [f"{row}, {way}" for way in ways for row in ROWS]
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["what"] in ("model", "compiled"):
            for row, of in line["rows"].items():
                cells = found.setdefault(line["case"], {})
                cells |= {f"{row}, {way}": of[f"{way}_ms"][0] for way in ways if f"{way}_ms" in of}
    text = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for case, cells in found.items():
        shown = []
        for head in heads:
            plain = cells.get(f"unmerged, {head.partition(', ')[2]}")
            if head not in cells or plain is None:
                shown.append("")
            elif head.startswith("unmerged"):
                shown.append(f"{cells[head]:.2f} ms")
            else:
                shown.append(f"{plain / cells[head]:.3f}")
        text.append(f"| {case} | {' | '.join(shown)} |")
    return "\n".join(text)


def go(run: Run, steps: Sequence[str], restart: Callable[[str], None] | None = None) -> None:
    """Takes the steps, as long as there is time.

    Args:
        restart: begins anew behind the step of that name, in a process of its own; None: a step is
            not stopped.
    """
    for name in steps:
        budget, call = STEPS[name]
        run.step = name
        if run.left < 10:
            run.note("left out", why=f"{run.left:.0f} s are left")
            continue
        start, watch = time.time(), None
        if restart is not None:

            def stop(name: str = name, after: float = min(budget, run.left)) -> None:
                run.note("failed", why=f"stopped after {after:.0f} s")
                restart(name)

            watch = threading.Timer(min(budget, run.left), stop)
            watch.daemon = True
            watch.start()
        try:
            call(run)
        except Exception as error:
            run.note("failed", why=first_line(error), where=traceback.format_exc()[-900:])
        finally:
            if watch is not None:
                watch.cancel()
        run.note("done", seconds=round(time.time() - start, 1))
        if run.is_cuda:
            gc.collect()
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:  # the context is lost
                run.note("failed", why=first_line(error))
                if restart is not None:
                    restart(name)


def _means(name: str, text: str) -> bool:
    """Whether `--only TEXT` means the step: the one of that name alone, else all that hold it."""
    return text == name if text in STEPS else text in name


@torch.no_grad()
def main(argv: Sequence[str] | None = None, restarts: bool = False) -> int:
    parser = argparse.ArgumentParser(
        prog="device_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/device")))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="steps whose names hold the text")
    parser.add_argument("--behind", nargs=2, metavar=("STEP", "BEGUN"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if (
        torch.__version__ < "2.13"
    ):  # the library asks for 2.13: compilers of older ones can't trace it
        torch.amp.is_autocast_available = lambda device_type: device_type in ("cuda", "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a CUDA device, found none (--device cpu --tiny rehearses)")
    steps = [name for name in STEPS if not args.only or any(map(partial(_means, name), args.only))]
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.out, torch.device(args.device), args.tiny, seconds=args.seconds)
    if args.behind:
        steps = steps[steps.index(args.behind[0]) + 1 :]
        run.begun = float(args.behind[1])
        text = (args.out / "results.jsonl").read_text(encoding="utf-8")
        run.lines = [json.loads(line) for line in text.splitlines()]
    else:
        (args.out / "results.jsonl").unlink(missing_ok=True)

    def restart(step: str) -> None:
        given = list(sys.argv[1:])
        if args.behind:
            del given[-3:]
        own = [sys.executable, "-m", "scripts.device_run"]
        os.execv(sys.executable, [*own, *given, "--behind", step, str(run.begun)])

    go(run, steps, restart if restarts else None)
    failed = [line for line in run.lines if line["what"] == "failed" or line.get("right") is False]
    found = {"seconds": round(time.time() - run.begun), "failed": failed, "lines": run.lines}
    (args.out / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(run.lines))
    print(json.dumps({"seconds": found["seconds"], "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(restarts=True))
