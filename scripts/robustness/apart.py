"""Compare calls of one model that run next to one another with the same calls alone.

    python -m scripts.robustness.apart [--seed 0] [--cases 20] [--kinds caches,encoders]

Calls run in threads and coroutines at once, and in batches that are padded on both sides. Other
kinds derive the classes of a model's modules, or wrap their forwards as tools do. Each case draws a
tiny model of random weights, settings and calls. Answers must be equal bit for bit in threads, and
nearly equal in batches. The output is one JSON line for each kind: how many cases were tried, how
they ended, and what failed. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd import NothingMergedError, apply_mame
from mame_sd.caches import compress_cache
from mame_sd.compat import cache_of, parameters_of, with_cache
from tests.builders.perception import ROWS
from tests.builders.tiny import tiny_unet, unet_inputs
from tests.builders.transformers import run as output_of
from tests.caches.tiny import MODELS as DECODERS
from tests.caches.tiny import padded, prompt, tiny
from tests.captions import tiny as llavas
from tests.matrix.models.registry import MODELS

Draw = random.Random
KEEPS = (0.1, 0.25, 0.5, 0.8)
# ControlNets return several outputs, and UVit2DModel takes no return_dict.
DENOISERS = [name for name in MODELS if "ControlNet" not in name and name != "UVit2DModel"]
near = partial(torch.testing.assert_close, rtol=1e-3, atol=2e-3)


def merging(draw: Draw, **more: Any) -> dict[str, Any]:
    """Fields of either method."""
    return draw.choice([{"keep": draw.choice(KEEPS)}, {"tau": draw.choice((0.2, 0.6))}]) | more


def together(root: nn.Module, draw: Draw, asks: list[Callable[[], Tensor]]) -> None:
    """Raise AssertionError if one of `asks` gives something else in threads than alone.

    Threads take turns in modules of `root` that are drawn.
    """
    alone, found = [ask() for ask in asks], []

    @torch.no_grad()
    def run(number: int) -> None:
        try:
            found.extend((number, asks[number]()) for _ in range(3))
        except Exception as error:
            found.append((number, error))

    def nap(*_: Any) -> None:
        time.sleep(0.002 * random.random())

    parts = [part for part in root.modules() if not isinstance(part, nn.ModuleList)]
    hooks = [part.register_forward_pre_hook(nap) for part in draw.sample(parts, 6)]
    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(asks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook in hooks:
        hook.remove()
    for number, other in [*found, *((number, ask()) for number, ask in enumerate(asks))]:
        if isinstance(other, Exception):
            raise other
        assert torch.equal(other, alone[number]), f"call {number} differs"


def denoisers(draw: Draw) -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **merging(draw, min_tokens=draw.choice((1, 30))))

    def ask(call: dict[str, Any], fields: dict[str, Any] | None) -> Tensor:
        with handle.using(**fields) if fields else nullcontext():
            return unet(**call, return_dict=False)[0]

    asks = []
    for seed in range(3):
        sizes = draw.choice((1, 2)), draw.choice((8, 12, 16)), draw.choice((8, 16))
        call = {**unet_inputs(unet, *sizes, seed), "timestep": draw.randrange(999)}
        asks.append(partial(ask, call, draw.choice((None, merging(draw, min_tokens=1)))))
    together(unet, draw, asks)


def coroutines(draw: Draw) -> None:
    """Images of one thread, a step at a time, some of them in threads of `asyncio.to_thread`."""
    unet = tiny_unet()
    handle = apply_mame(unet, **merging(draw, min_tokens=draw.choice((1, 30))))
    texts = torch.randn(2, 1, 7, unet.config.cross_attention_dim)

    @torch.no_grad()
    def step(latents: Tensor, timestep: int) -> Tensor:
        return torch.cat([unet(latents, timestep, text).sample for text in texts])

    async def image(seed: int, fields: dict[str, Any] | None, apart: bool) -> Tensor:
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed))
        with handle.using(**fields) if fields else nullcontext():
            for timestep in (800, 500, 20):
                if apart:
                    latents = (await asyncio.to_thread(step, latents, timestep)).mean(0, True)
                    continue
                made = []
                for text in texts:  # the two calls of guidance, others between them
                    with torch.no_grad():
                        made.append(unet(latents, timestep, text).sample)
                    await asyncio.sleep(0)
                latents = torch.cat(made).mean(0, True)
        return latents

    forms = [(draw.choice((None, merging(draw, min_tokens=1))), draw.random() < 0.3) for _ in "abc"]

    async def at_once() -> list[Tensor]:
        return await asyncio.gather(*(image(i, *form) for i, form in enumerate(forms)))

    alone = [asyncio.run(image(i, *form)) for i, form in enumerate(forms)]
    for number, (one, other) in enumerate(zip(asyncio.run(at_once()), alone, strict=True)):
        assert torch.equal(one, other), f"image {number} differs"


def renamed(draw: Draw) -> None:
    """Derive the classes of a denoiser's modules, as FSDP2 does, before merging or after it."""
    case = MODELS[draw.choice(DENOISERS)]
    model, inputs = case.build(), case.inputs()
    form = {"keep": draw.choice(KEEPS), "min_tokens": 1}
    with apply_mame(model, **form):
        want = output_of(inputs, model)
    late = draw.random() < 0.5
    if late:
        apply_mame(model, **form)
    for module in model.modules():
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})
    if not late:
        apply_mame(model, **form)
    assert torch.equal(output_of(inputs, model), want), f"{type(model).__name__} differs"


def passing_on(own: Callable[..., Any], named: bool) -> Callable[..., Any]:
    """Wrap `own` as tools do; `named` by functools.wraps, so that its signature can be found."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return wraps(own)(forward) if named else forward


def left_unmerged(handle: Any) -> bool:
    """Return True if the report says of a layer that it was not merged."""
    try:
        return not all(layer.merged for layer in handle.report().layers)
    except NothingMergedError:
        return True


def wrapped(draw: Draw) -> str:
    """Wrap the forwards of drawn classes of a denoiser, then merge and call it by position.

    Return "told" if the output differs, but a warning or the report says that names are hidden.
    """
    case = MODELS[draw.choice(DENOISERS)]
    model, inputs = case.build(), dict(case.inputs())
    form = {"keep": draw.choice(KEEPS), "min_tokens": 1}
    order = list(takewhile(inputs.__contains__, parameters_of(type(model))))
    by_place = partial(model, *(inputs.pop(name) for name in order))
    with apply_mame(model, **form):
        want = output_of(inputs, by_place)
    kinds = {type(part) for part in model.modules() if "forward" in vars(type(part))}
    own = {kind: kind.forward for kind in kinds if kind.__module__.startswith("diffusers.")}
    chosen = draw.sample(sorted(own, key=str), draw.randint(1, len(own)))
    named = draw.random() < 0.7
    try:
        for kind in chosen:
            kind.forward = passing_on(own[kind], named)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with apply_mame(model, **form) as handle:
                got, told = output_of(inputs, by_place), left_unmerged(handle)
    finally:
        for kind in chosen:
            kind.forward = own[kind]
    if torch.equal(got, want):
        return "held"
    names = ", ".join(kind.__name__ for kind in chosen)
    assert not named, f"{type(model).__name__} differs with wrapped {names}"
    told |= any("forward was replaced" in str(one.message) for one in said)
    assert told, f"{names}: not told"
    return "told"


def encoders(draw: Draw) -> None:
    row = draw.choice([row for row in ROWS if "MAE" not in row.name])
    model = row.build()
    apply_mame(model, **merging(draw, restore=draw.choice((None, True))))

    def ask(call: dict[str, Any]) -> Tensor:
        return torch.cat([out.flatten() for out in row.call(model, call).values()])

    together(model, draw, [partial(ask, row.batch(draw.choice((1, 3)), seed)) for seed in range(3)])


def decoder(draw: Draw) -> tuple[Any, Callable[[], Any]]:
    """Return a language model, and a function that draws blocks that shorten its cache."""
    model = tiny(draw.choice([*DECODERS]), draw.choice(("sdpa", "eager")))
    return model, lambda: partial(compress_cache, model, draw.choice(KEEPS))


def caches(draw: Draw) -> None:
    model, block = decoder(draw)
    more = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}

    def ask(ids: Tensor, around: Any) -> Tensor:
        with around():
            written = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **more
            )
        return torch.stack(written.logits)

    prompts = [prompt(draw.randint(20, 90), draw.choice((1, 2)), seed) for seed in range(3)]
    compressed = draw.random() < 0.8  # in each thread: prompts outside of blocks raise beside them
    together(
        model,
        draw,
        [partial(ask, ids, block() if compressed else nullcontext) for ids in prompts],
    )


def pictured(draw: Draw, seed: int, sides: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Prompts of a LLaVA with pictures, padded on the left or right, and then on both `sides`."""
    rows = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
    call = llavas.prompts([[llavas.GRID**2] * count for count in rows], draw.random() < 0.5, seed)
    call["input_ids"] = nn.functional.pad(call["input_ids"], sides, value=llavas.PAD)
    call["attention_mask"] = nn.functional.pad(call["attention_mask"], sides)
    return {**call, "pixel_values": llavas.pictures(sum(rows), seed=seed)}


def captioners(draw: Draw) -> None:
    model = llavas.llava()
    apply_mame(model, keep=draw.choice(KEEPS))

    def ask(call: dict[str, Any], form: dict[str, Any] | None) -> Tensor:
        with nullcontext() if form is None else apply_mame(model, **form):
            written = model.generate(**call, max_new_tokens=3, min_new_tokens=3, do_sample=False)
            return torch.cat([written.flatten(), model(**call).logits.flatten()])

    forms = [draw.choice((None, {"keep": draw.choice(KEEPS)})) for _ in range(3)]
    together(model, draw, [partial(ask, pictured(draw, i), form) for i, form in enumerate(forms)])


def padded_captioners(draw: Draw) -> None:
    whole = {"vision_feature_select_strategy": "full"}  # SigLIP has no class token to leave out
    tower, more = draw.choice(((llavas.CLIP, {}), (llavas.SIGLIP, whole)))
    model = llavas.llava(tower, **more)
    call = pictured(draw, draw.randrange(9), (draw.randint(0, 4), draw.randint(0, 4)))
    apply_mame(model, keep=draw.choice(KEEPS))
    got, start = model(**call).logits, 0
    for row, mask in enumerate(call["attention_mask"].bool()):
        ids = call["input_ids"][row][mask][None]
        end = start + int((ids == llavas.IMAGE).sum()) // llavas.GRID**2
        want = model(input_ids=ids, pixel_values=call["pixel_values"][start:end]).logits[0]
        first, start = int((got[row, :, 0] - want[0, 0]).abs().argmin()), end
        near(got[row, first : first + len(want)], want)


def padded_caches(draw: Draw) -> None:
    model, blocks = decoder(draw)
    block, new = blocks(), prompt(3, seed=9)
    asked = [prompt(draw.randint(2, 40), seed=seed) for seed in range(draw.randint(1, 4))]
    parts = [padded(ids, draw.randint(0, 49 - ids.shape[1]), 49) for ids in asked]
    ids, mask = (torch.cat(each) for each in zip(*parts, strict=True))
    whole = torch.cat([mask, torch.ones(len(ids), 3, dtype=torch.long)], 1)
    places = (whole.cumsum(1) - 1).clamp(min=0)

    def after(first: dict[str, Any], then: dict[str, Any]) -> Tensor:
        with block() as handle:
            past = cache_of(model(**first, use_cache=True))
            handle.keep = 1
            return model(**then, **with_cache(model, past)).logits

    first = {"input_ids": ids, "attention_mask": mask, "position_ids": places[:, :49]}
    then = {"attention_mask": whole, "position_ids": places[:, 49:]}
    got = after(first, {"input_ids": new.repeat(len(ids), 1), **then})
    for own, one in zip(got, asked, strict=True):
        near(own, after({"input_ids": one}, {"input_ids": new})[0])


@torch.no_grad()
def main(about: str, kinds: dict[str, Callable[[Draw], str | None]], cases: int) -> int:
    """Draw and count cases of `kinds`, which raise where they fail, and else say how they ended."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=cases, help="of each kind")
    parser.add_argument("--kinds", default=",".join(kinds), help="with commas between")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    good = True
    for kind in arguments.kinds.split(","):
        counts: Counter[str] = Counter()
        failed: dict[int, str] = {}
        for number in range(arguments.cases):
            try:
                counts[kinds[kind](Draw(f"{arguments.seed}/{kind}/{number}")) or "held"] += 1
            except Exception as error:
                failed[number] = f"{type(error).__name__}: {error}"[:600]
        line = {"kind": kind, "tried": arguments.cases, **counts, "failed": failed}
        print(json.dumps(line), flush=True)
        good &= not failed
    return int(not good)


if __name__ == "__main__":
    at_once = (denoisers, coroutines, encoders, caches, captioners)
    found = (*at_once, padded_captioners, padded_caches, renamed, wrapped)
    sys.exit(main(__doc__ or "", {kind.__name__: kind for kind in found}, 20))
