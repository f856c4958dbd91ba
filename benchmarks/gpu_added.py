"""What merging adds to one layer, counted from the library's own kernels: where the numbers of
`mame_sd.core.costs` are from.

python -m benchmarks.gpu_added        # prints ADDED as it stands in costs.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from benchmarks import shapes
from benchmarks.launches import CARD, META, counted, on_card, pretended
from mame_sd import MaMeConfig, mame
from mame_sd.core.cards import CARDS, Card, Work
from mame_sd.core.costs import UNMERGED, Added, Call, Form, spent, work_of

EARLY, LATE = "UNet", "transformer"
_KINDS: dict[Form, tuple[str, dict[str, Any]]] = {
    Form(False, True): (EARLY, {"keep": 0.25, "merge": "kv"}),
    Form(False, True, correct=False): (EARLY, {"keep": 0.25, "merge": "kv", "correct": False}),
    Form(False, True, "pick", correct=False): (EARLY, {"keep": 0.25, "weights": "pick"}),
    Form(True, True): (EARLY, {"keep": 0.5, "merge": "qkv"}),
    Form(False, False): (LATE, {"keep": 0.25, "merge": "kv"}),
    Form(False, False, correct=False): (LATE, {"keep": 0.25, "merge": "kv", "correct": False}),
    Form(False, False, "pick", correct=False): (LATE, {"keep": 0.25, "weights": "pick"}),
    Form(True, False): (LATE, {"keep": 0.625, "merge": "qkv"}),
}
# Each with our kernels and without.
FORMS = {
    form._replace(kernels=kernels): found
    for kernels in (True, False)
    for form, found in _KINDS.items()
}


@dataclass(frozen=True)
class Sample:
    """A self-attention layer of a published model, and how to call it."""

    call: Call
    build: Callable[
        [], tuple[nn.Module, Callable[[], Any], Callable[[], Any], Mapping[int, Tensor]]
    ]

    def work(self, form: Form | None) -> list[Work]:
        """The kernels of the layer, unmerged or in this form."""
        return _counted(self, form)


@cache
def _counted(sample: Sample, form: Form | None) -> list[Work]:
    model, reach, run, known = sample.build()
    size = (round(sample.call.tokens**0.5),) * 2 if isinstance(model, Attention) else None
    fields = {} if form is None else FORMS[form][1]
    merging = (
        mame(model, MaMeConfig.from_dict({"min_tokens": 1, "size": size, **fields}))
        if form
        else nullcontext()
    )
    with merging, pretended(known, kernels=form is None or form.kernels):
        reach()
        return counted(run)


def _plain(side: int, channels: int, heads: int, dtype: torch.dtype = torch.float16) -> Sample:
    call = Call(2, side * side, 0, channels, channels, heads, dtype)

    def build() -> tuple[nn.Module, Callable[[], Any], Callable[[], Any], Mapping[int, Tensor]]:
        with META:
            attention = Attention(channels, heads=heads, dim_head=channels // heads)
        attention = on_card(attention.to(dtype))

        def run() -> Any:
            return attention(torch.empty(2, side * side, channels, dtype=dtype, device=CARD))

        return attention, run, run, {}

    return Sample(call, build)


def _joint(name: str, tokens: int = 0) -> Sample:
    shape = shapes.SHAPES[name]
    shape = shape.cut(tokens) if tokens else shape
    context = 0 if name == "wan" else shape.text
    call = Call(1, shape.tokens, context, shape.dim, shape.dim, shape.heads, torch.bfloat16)

    def build() -> tuple[nn.Module, Callable[[], Any], Callable[[], Any], Mapping[int, Tensor]]:
        layer = shapes.Layer(shape, META, torch.bfloat16)
        known = {}
        if "img_ids" in layer._inputs:
            known[id(layer._inputs["img_ids"])] = shape.inputs(shape)["img_ids"]

        def run() -> Any:
            return layer(torch.empty(1, shape.tokens, shape.dim, dtype=torch.bfloat16, device=CARD))

        return on_card(layer.model), layer.reach, run, known

    return Sample(call, build)


SAMPLES: dict[str, dict[str, Sample]] = {
    EARLY: {
        "SD 1.5 at 512, first level": _plain(64, 320, 8),
        "SD 1.5 at 512, second level": _plain(32, 640, 8),
        "SD 2.1 at 768, first level": _plain(96, 320, 5),
        "SD 2.1 at 768, first level, fp32": _plain(96, 320, 5, torch.float32),
        "SDXL at 1024, first attention": _plain(64, 640, 10),
        "SDXL at 1024, last attention": _plain(32, 1280, 20),
    },
    LATE: {
        "SD 3.5 large at 1024": _joint("sd3.5-large"),
        "FLUX.1 at 1024": _joint("flux"),
        "Wan 2.1 1.3B at 480p": _joint("wan"),
        "Wan 2.1 1.3B, four frames": _joint("wan", 6240),
    },
}


def _fit(samples: Sequence[Sample], over: Callable[[Card, Sample], tuple[float, float]]) -> Added:
    """Smallest kernels and bytes that come nearest to `over`: seconds beyond the known, and of the
    whole layer.
    """
    rows, wanted = [], []
    for sample in samples:
        for card in CARDS.values():
            extra, whole = over(card, sample)
            small, moved = (
                spent(card, sample.call, one) / whole for one in (Added(1, 0), Added(0, 1))
            )
            rows.append([small, moved])
            wanted.append([extra / whole])
    matrix, aim = (torch.tensor(t, dtype=torch.float64) for t in (rows, wanted))
    small, moved = torch.linalg.lstsq(matrix, aim).solution.flatten().tolist()
    return Added(max(0, round(small)), round(max(0.0, moved), 1))


def launches(kind: str, form: Form | None) -> int:
    """Kernels that merging adds to a layer, the most of all samples; None: those of an unmerged
    one, the fewest.
    """
    found = [
        [sum(n.launches for n in one.work(which)) for which in (form, None)]
        for one in SAMPLES[kind].values()
    ]
    return (
        min(plain for _, plain in found)
        if form is None
        else max(merged - plain for merged, plain in found)
    )


def of_unmerged(kind: str) -> Added:
    """What a layer that merges nothing does beside its products and its attention."""

    def over(card: Card, sample: Sample) -> tuple[float, float]:
        whole = card.busy(sample.work(None))
        return whole - card.busy(work_of(sample.call)), whole

    found = _fit(list(SAMPLES[kind].values()), over)
    return found._replace(
        launches=launches(kind, None) - len(work_of(next(iter(SAMPLES[kind].values())).call))
    )


def added_by(form: Form) -> Added:
    """What merging adds in this form."""
    kind, fields = FORMS[form]

    def over(card: Card, sample: Sample) -> tuple[float, float]:
        whole, used = card.busy(sample.work(form)), masked(form, sample)
        unmerged = UNMERGED[form.early]
        fewer = (
            unmerged._replace(moved=fields["keep"] * unmerged.moved) if form.queries else unmerged
        )
        return whole - card.busy(work_of(sample.call, fields["keep"], used)) - spent(
            card, sample.call, fewer
        ), whole

    return _fit(list(SAMPLES[kind].values()), over)._replace(launches=launches(kind, form))


def masked(form: Form, sample: Sample) -> Form:
    """The form as it is in a sample's layer."""
    uneven = FORMS[form][1]["keep"] not in (0.5, 0.25)
    return form._replace(masked=uneven or (sample.call.context > 0 and not form.early))


def main() -> None:
    for kind in SAMPLES:
        UNMERGED[kind == EARLY] = of_unmerged(kind)
    print(f"UNMERGED = {UNMERGED}\nADDED = {{")
    for form in FORMS:
        print(f"    {form}: {added_by(form)},", flush=True)
    print("}")


if __name__ == "__main__":
    main()
