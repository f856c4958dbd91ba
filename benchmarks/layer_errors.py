"""What attention over fewer keys loses in single layers: relative L2 error of outputs, with q, k
and v of trained models.

    python -m benchmarks.layer_errors                      # the embedded transformer
    python -m benchmarks.layer_errors --model dinov2 --images PHOTO.png ...
    python -m benchmarks.layer_errors --sharper 4          # queries 4 times as long
    python -m benchmarks.layer_errors --model images       # PSNR of whole images instead

Text (or the class token) stays as it is, and the image's queries alone are measured. Errors are
means over layers, and over 3 of 10 steps of each prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.forms import Attend, Draw, Fit, InDtype, Merged, Picked, exact
from benchmarks.generation import generate, load
from benchmarks.instruments import INSTRUMENTS
from mame_sd.diffusion.apply_denoiser import denoiser_of

STEPS = 10
SHARES = {"1/4": 1 / 4, "1/8": 1 / 8}


def rows() -> dict[str, Attend]:
    found: dict[str, Attend] = {}
    for name, keep in SHARES.items():
        found |= {
            f"{name} random keys": Picked(keep),
            f"{name} random keys, fit 128": Picked(keep, fit=Fit(128)),
            f"{name} means of cells, fit 128": Merged(keep, Fit(128), by="means"),
            f"{name} plan": Merged(keep),
            f"{name} plan, corrected": Merged(keep, corrected=True),
            f"{name} plan, by cosine": Merged(keep, near="cosine"),
            f"{name} plan, by cosine, fit 128": Merged(keep, Fit(128), near="cosine"),
            f"{name} plan, by cosine, none alone, fit 128": Merged(
                keep, Fit(128), near="cosine", alone=0
            ),
            **{f"{name} plan, fit {m}": Merged(keep, Fit(m)) for m in (32, 64, 128, 256)},
            **{
                f"{name} plan, {alone:g} alone, fit 128": Merged(keep, Fit(128), alone=alone)
                for alone in (0, 0.0625, 0.25, 0.5)
            },
            f"{name} plan, each head its own, fit 128": Merged(keep, Fit(128), by="heads"),
            f"{name} plan, shared by samples, fit 128": Merged(keep, Fit(128), by="pair"),
            f"{name} plan, by logits, fit 128": Merged(keep, Fit(128), by="logits"),
            f"{name} plan, whole, fit 128": Merged(keep, Fit(128), tiles=0),
            f"{name} plan, corrected, fit 64": Merged(keep, Fit(64), True),
            f"{name} plan, corrected, fit 128": Merged(keep, Fit(128), True),
            **{
                f"{name} plan, fit 128, lambda {lam:g}": Merged(keep, Fit(128, lam))
                for lam in (0.01, 0.3, 1)
            },
            **{
                f"{name} plan, fit {m}, Gaussian {s:g} {w:g}": Merged(keep, Fit(m, w=w, s=s))
                for m, s, w in (
                    (64, 0.25, 0.3),
                    (128, 0.1, 0.3),
                    (128, 0.25, 0.3),
                    (128, 0.5, 0.3),
                    (128, 0.25, 1),
                    (128, 0.1, 1),
                )
            },
            f"{name} plan, corrected, fit 128, Gaussian 0.1 1": Merged(
                keep, Fit(128, w=1, s=0.1), True
            ),
            f"{name} plan, corrected, Gaussian alone 0.1, 128": Merged(
                keep, Fit(128, kernel=False, w=1, s=0.1), True
            ),
            f"{name} plan, fit 128, bf16": InDtype(Merged(keep, Fit(128)), torch.bfloat16),
            f"{name} plan, fit 128, fp16": InDtype(Merged(keep, Fit(128)), torch.float16),
        }
    found["unmerged, bf16"] = InDtype(exact, torch.bfloat16)
    return found


class Replaced(TorchFunctionMode):
    """Gives the self-attention over an image of `grid` to `use(q, k, v, beside)`; q's are those of
    the image, then of the rest. What it returns is their output.

    Args:
        first: where the image begins among the tokens.
    """

    def __init__(self, grid: tuple[int, int], first: int, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self._n, self._first, self._use = grid[0] * grid[1], first, use

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = (
            kwargs[name] if name in kwargs else args[i]
            for i, name in enumerate(("query", "key", "value"))
        )
        if k.shape[2] < self._n or q.shape[2] != k.shape[2]:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            q, k, v = (t.roll(-self._first, 2) for t in (q, k, v))
            image, rest = ([t[:, :, part] for t in (k, v)] for part in self._parts())
            return self._use(q, *image, tuple(rest)).roll(self._first, 2)

    def _parts(self) -> tuple[slice, slice]:
        return slice(0, self._n), slice(self._n, None)


class Errors:
    """Measures every row on calls of attention, and lets them through."""

    def __init__(self, forms: Mapping[str, Attend], grid: tuple[int, int], sharper: float) -> None:
        self._forms, self._grid, self._sharper = forms, grid, sharper
        self.on = True
        self.calls = 0
        self.found: dict[str, list[float]] = defaultdict(list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, beside: tuple[Tensor, Tensor]) -> Tensor:
        n, draw = k.shape[2], Draw.of(self.calls)
        draw.beside = beside
        if self.on:
            self.calls += 1
            asked = self._sharper * q
            want = exact(asked, k, v, self._grid, draw)[:, :, :n]
            for name, form in self._forms.items():
                draw = Draw(torch.Generator().manual_seed(self.calls), beside=beside)
                got = form(asked, k, v, self._grid, draw)[:, :, :n]
                self.found[name].append(((got - want).norm() / want.norm()).item())
        return exact(q, k, v, self._grid, draw)


def transformer_errors(forms: Mapping[str, Attend], num: int, sharper: float) -> Errors:
    on = INSTRUMENTS["transformer"]
    model = load(torch.device("cpu"), torch.float32, on.model)
    errors = Errors(forms, (32, 32), sharper)
    for seed, prompt in enumerate(on.prompts(num)):
        steps = iter(range(STEPS))

        def count(*_: Any, steps: Any = steps) -> None:
            errors.on = next(steps) in (1, 5, 8)

        handle = denoiser_of(model.pipe).register_forward_pre_hook(count)
        with Replaced((32, 32), 0, errors):
            generate(model, [prompt], STEPS, seed, output="latent")
        handle.remove()
    return errors


def dinov2_errors(
    forms: Mapping[str, Attend], images: list[Path], side: int, sharper: float
) -> Errors:
    from PIL import Image

    from mame_sd.eval.networks.pretrained import DEVIATION, MEAN, load_dinov2_saliency

    model = load_dinov2_saliency().backbone
    errors = Errors(forms, (side // 14, side // 14), sharper)
    for file in images:
        image = Image.open(file).convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None] / 255
        mean, deviation = (torch.tensor(t).view(3, 1, 1) for t in (MEAN, DEVIATION))
        with Replaced((side // 14, side // 14), 1, errors):
            model((pixels - mean) / deviation)
    return errors


def images(forms: Mapping[str, Attend], num: int, steps: int) -> dict[str, list[float]]:
    """PSNR (dB) of the transformer's images to the unmerged ones, by row."""
    on = INSTRUMENTS["transformer"]
    model = load(torch.device("cpu"), torch.float32, on.model)
    prompts, found = on.prompts(num), defaultdict(list)
    wanted = [generate(model, [prompt], steps, seed) for seed, prompt in enumerate(prompts)]
    for name, form in forms.items():
        for seed, prompt in enumerate(prompts):
            draw = Draw.of(seed)

            def use(
                q: Tensor,
                k: Tensor,
                v: Tensor,
                beside: tuple[Tensor, Tensor],
                form: Attend = form,
                draw: Draw = draw,
            ) -> Tensor:
                draw.beside = beside
                return form(q, k, v, (32, 32), draw)

            with Replaced((32, 32), 0, use):
                got = generate(model, [prompt], steps, seed)
            error = np.square((got.astype(float) - wanted[seed]) / 255).mean()
            found[name].append(float(-10 * np.log10(max(error, 1e-10))))
        values = found[name]
        spread = statistics.stdev(values) / len(values) ** 0.5 if num > 1 else 0
        print(f"| {name} | {statistics.fmean(values):.1f} +- {spread:.1f} |", flush=True)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=("transformer", "dinov2", "images"), default="transformer"
    )
    parser.add_argument("--num", type=int, default=2, help="prompts (default 2)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of whole images (default 10)")
    parser.add_argument("--images", type=Path, nargs="+", help="photographs for dinov2")
    parser.add_argument("--side", type=int, default=504, help="of a photograph (default 504)")
    parser.add_argument("--sharper", type=float, default=1, help="factor of the queries")
    parser.add_argument("--rows", nargs="+", help="rows of exactly these names")
    args = parser.parse_args()
    forms = {name: form for name, form in rows().items() if not args.rows or name in args.rows}
    if args.model == "images":
        result: Any = images(forms, args.num, args.steps)
    else:
        errors = (
            transformer_errors(forms, args.num, args.sharper)
            if args.model == "transformer"
            else dinov2_errors(forms, args.images, args.side, args.sharper)
        )
        result = {name: statistics.fmean(values) for name, values in errors.found.items()}
        print(f"| keys ({errors.calls} calls) | relative error |\n|---|---|")
        for name, value in result.items():
            print(f"| {name} | {value:.4f} |")
    print(json.dumps({"torch": torch.__version__, **vars(args), "results": result}, default=str))


if __name__ == "__main__":
    main()
