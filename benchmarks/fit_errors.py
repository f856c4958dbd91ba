"""Compare the estimated errors of restored MLPs with the true ones, on trained models.

    python -m benchmarks.fit_errors

Each model makes a few samples with MLPs on a share of the tokens. The true error of an MLP is the
distance of its restored tokens from its own output for the same input, relative to the deviation of
its own output from its mean. `MaMeHandle.estimating_errors` gives the estimate. Cells are the
median and, in brackets, the largest over the model's MLPs. The rank correlation is that of the
estimates and the true errors over MLPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks import parser_of
from mame_sd import apply_mame
from mame_sd.embedded.model import models_folder
from mame_sd.embedded.pipeline import embedded_pipeline
from mame_sd.embedded.scenes import scenes_by_caption
from mame_sd.eval.benchmark.prompts import drawn
from mame_sd.eval.instruments.flow import sample
from mame_sd.eval.instruments.models import conditions, load_instrument
from mame_sd.eval.tables import markdown_table

STEPS = 4
SHARES = (0.25, 0.125, 0.0625)


class TrueErrors:
    """Forward hook that sums squared errors and squared deviations of an MLP's output.

    Args:
        share: the share of the tokens that are computed, whose errors are 0.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.errors = self.deviations = 0.0

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        """Compute the module's own output too, and compare."""
        own: Tensor = type(module).forward(module, *args, **kwargs)
        self.errors += float((output - own).square().sum())
        self.deviations += float((own - own.mean(1, keepdim=True)).square().sum())

    @property
    def relative(self) -> float:
        """Return the relative error of the restored tokens."""
        return math.sqrt(self.errors / self.deviations / (1 - self.share))


def models(num: int) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """Yield each model's label, what merging is applied to, and what makes `num` samples."""
    prompts = [prompt.text for prompt in drawn(scenes_by_caption(), num, seed=1)]
    for label, guidance, lora in (
        ("transformer", 2.5, None),
        ("with the few-step LoRA", 1.0, models_folder() / "few_steps"),
    ):
        pipe = embedded_pipeline("transformer")
        pipe.set_progress_bar_config(disable=True)
        if lora is not None:
            pipe.load_lora_weights(lora)
        generators = [torch.Generator().manual_seed(number) for number in range(num)]
        given = {"num_inference_steps": STEPS, "guidance_scale": guidance, "output_type": "latent"}
        yield label, pipe, partial(pipe, prompts, generator=generators, **given)
    for name in ("photographs", "video"):
        instrument, thumbnails = load_instrument(name), conditions(name)[:num]
        yield name, instrument.model, partial(sample, instrument, thumbnails, STEPS, 2.0, seed=1)


def errors_of(
    model: Any, make: Callable[[], object], share: float
) -> tuple[list[float], list[float]]:
    """Return the estimated and the true errors of the MLPs that are restored."""
    with apply_mame(model, keep=1, mlp_keep=share, min_tokens=1) as handle:
        true = {hook.stats.name: TrueErrors(share) for _, hook in handle.restored}
        removable = [
            module.register_forward_hook(true[hook.stats.name], with_kwargs=True)
            for module, hook in handle.restored
            if hook.stats.kind == "mlp"
        ]
        with handle.estimating_errors():
            make()
        for one in removable:
            one.remove()
        layers = [it for it in handle.report().layers if it.error is not None]
    return [it.error or 0.0 for it in layers], [true[it.name].relative for it in layers]


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--num", type=int, default=2, help="samples of each model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = ["", "share of the tokens", "true error", "estimated", "rank correlation", "MLPs"]
    print(markdown_table(head, []))
    for label, model, make in models(args.num):
        for share in SHARES:
            estimated, true = errors_of(model, make, share)
            cells = [f"{median(them):.2f} ({max(them):.2f})" for them in (true, estimated)]
            rank = spearmanr(estimated, true).statistic
            line = [label, f"{share:g}", *cells, f"{rank:.2f}", str(len(true))]
            print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
