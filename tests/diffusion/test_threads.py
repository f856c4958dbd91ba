"""Test threads that generate with one model: each has its own step, size and settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from mame_sd import apply_mame, remove_mame
from mame_sd.diffusion.apply_denoiser import hooks_on
from tests.builders.pipelines import mame_pipeline
from tests.builders.tiny import generate, run_unet, tiny_pipeline, tiny_unet, unet_inputs

MERGED = {"keep": 0.5, "min_tokens": 16}
BUSY = "expected no image under way in another thread"


@contextmanager
def standing(module: Any, run: Any) -> Iterator[Any]:
    """Call `run` in another thread, which waits in the first call of `module` during the block."""
    inside, go = threading.Event(), threading.Event()
    main = threading.get_ident()

    def wait(*_: Any) -> None:
        if threading.get_ident() != main and not go.is_set():
            inside.set()
            assert go.wait(60)

    hook = module.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        try:
            assert inside.wait(60)
            yield future
        finally:
            go.set()
            future.result(60)
            hook.remove()


def test_a_forward_keeps_its_step_and_size_while_another_one_runs() -> None:
    unet = tiny_unet()
    apply_mame(unet, **MERGED)

    def run(timestep: int, height: int) -> Tensor:
        with torch.no_grad():
            inputs = unet_inputs(unet, height=height, width=64 // (height // 4))
            return unet(**{**inputs, "timestep": torch.tensor(timestep)})[0]

    expected = run(900, 16)
    other = run(100, 8)
    assert not torch.equal(run(100, 16), expected)  # the step matters
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    with standing(block, lambda: run(900, 16)) as future:
        assert torch.equal(run(100, 8), other)
    assert torch.equal(future.result(), expected)


def test_settings_of_a_thread_are_its_own() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **MERGED)
    common = run_unet(unet)
    with handle.using(keep=0.25):
        assert handle.config.keep == 0.25
        quarter = run_unet(unet)
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(run_unet, unet).result(), common)
    assert not torch.equal(quarter, common)
    assert handle.config.keep == 0.5
    assert torch.equal(run_unet(unet), common)
    handle.active = False
    with handle.using(keep=0.25):
        assert handle.active
        assert torch.equal(run_unet(unet), quarter)
    assert not handle.active


def test_coroutines_of_a_thread_make_what_they_make_alone() -> None:
    """Each coroutine has its own settings and a plan that its two calls of an input share."""
    unet = tiny_unet()
    handle = apply_mame(unet, **MERGED)
    texts = torch.randn(2, 1, 7, unet.config.cross_attention_dim)

    async def image(keep: float, seed: int) -> Tensor:
        inputs = unet_inputs(unet)
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed))
        made = []
        with handle.using(keep=keep):
            for text in texts:
                with torch.no_grad():
                    made.append(
                        unet(latents, inputs["timestep"], encoder_hidden_states=text).sample
                    )
                await asyncio.sleep(0)
            kept = await asyncio.to_thread(lambda: handle.config.keep)
            assert kept == keep
        return torch.cat(made)

    async def at_once() -> list[Tensor]:
        return await asyncio.gather(image(0.25, 1), image(0.6, 2))

    alone = [asyncio.run(image(0.25, 1)), asyncio.run(image(0.6, 2))]
    found = asyncio.run(at_once())
    assert all(map(torch.equal, found, alone))
    assert handle.config.keep == 0.5


def test_a_model_changes_only_between_images() -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, **MERGED)
    expected = generate(pipe)
    with standing(pipe.unet.mid_block, lambda: generate(pipe)) as future:
        for change in (
            lambda: handle.set(keep=0.25),
            lambda: setattr(handle, "active", False),
            handle.remove,
            lambda: apply_mame(pipe, keep=0.25),
            lambda: remove_mame(pipe),
            lambda: remove_mame(pipe.unet.up_blocks[0]),
        ):
            with pytest.raises(RuntimeError, match=BUSY):
                change()
        assert handle.installed
        assert (handle.active, handle.config.keep) == (True, 0.5)
        handle.install()  # changes nothing
        apply_mame(tiny_unet(), **MERGED)  # another model
    assert torch.equal(future.result(), expected)
    handle.set(keep=0.25)
    assert not torch.equal(generate(pipe), expected)


@pytest.mark.parametrize(
    ("place", "error"), [("conv_in", ValueError), ("mid_block", KeyboardInterrupt)]
)
def test_a_forward_that_ended_by_an_error_is_not_under_way(
    place: str, error: type[BaseException]
) -> None:
    """This is also true before any layer has merged (`conv_in`)."""
    unet = tiny_unet()
    handle = apply_mame(unet, **MERGED)

    def fail(*_: Any) -> None:
        raise error

    failing = unet.get_submodule(place).register_forward_pre_hook(fail)
    with ThreadPoolExecutor(1) as pool:

        def attempt() -> None:
            with contextlib.suppress(error):
                run_unet(unet)

        pool.submit(attempt).result(60)
        failing.remove()
        handle.set(keep=0.25)
    assert handle.config.keep == 0.25


def test_a_block_that_ends_during_an_image_removes_merging() -> None:
    pipe = tiny_pipeline()
    for kind in (None, ValueError):  # an error of the block is not hidden by that of its end
        handle = apply_mame(pipe, **MERGED)
        busy = pytest.raises(RuntimeError, match=f"the end of the block: {BUSY}")
        with (
            standing(pipe.unet.mid_block, lambda: generate(pipe)),
            busy if kind is None else nullcontext(),
        ):
            handle.__exit__(kind, None, None)
        assert not hooks_on(pipe)


def test_a_call_of_our_pipeline_gives_another_handle_back_during_an_image() -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, **MERGED)
    merged, other = generate(pipe), ExitStack()

    def end(*_: Any) -> dict[str, Any]:
        other.enter_context(standing(pipe.unet.mid_block, lambda: generate(pipe)))
        return {}

    ours = mame_pipeline(tau=None, keep=0.5, unet=pipe.unet)
    with other, pytest.raises(RuntimeError, match=f"the end of the call: {BUSY}"):
        generate(ours, num_inference_steps=1, callback_on_step_end=end)
    assert handle.installed
    assert torch.equal(generate(pipe), merged)


def test_calls_of_one_pipeline_merge_each_by_itself() -> None:
    pipe = mame_pipeline(tau=None, keep=0.5)
    half, quarter, plain = generate(pipe), generate(pipe, keep=0.25), generate(pipe, tau=None)
    assert not torch.equal(half, quarter)
    with standing(pipe.unet.mid_block, lambda: generate(pipe)) as future:
        assert torch.equal(generate(pipe, keep=0.25), quarter)
        assert torch.equal(generate(pipe, tau=None), plain)
    assert torch.equal(future.result(), half)
    assert torch.equal(generate(pipe, tau=None), plain)
    with standing(pipe.unet.mid_block, lambda: generate(pipe, tau=None)) as future:
        assert torch.equal(generate(pipe), half)
    assert torch.equal(future.result(), plain)


def test_two_pipelines_of_one_unet_do_not_merge_at_once() -> None:
    first = mame_pipeline(tau=None, keep=0.5)
    second = mame_pipeline(tau=None, keep=0.25, unet=first.unet)
    half, quarter = generate(first), generate(second)
    for module in (first.unet.mid_block, first.vae.decoder):  # in a forward of the UNet, after it
        with (
            standing(module, lambda: generate(first)) as future,
            pytest.raises(RuntimeError, match=BUSY),
        ):
            generate(second)
        assert torch.equal(future.result(), half)
    assert torch.equal(generate(second), quarter)
    assert torch.equal(generate(first), half)


FORKS = """
import os, threading
from torch import nn
from mame_sd import report
from mame_sd.captions import patch, shorten
from mame_sd.diffusion import threads
model, inside, locks = nn.Linear(1, 1), threading.Event(), (
    threads.CHANGES, patch._CHANGES, shorten._TOWER, report.ADDING
)
def draws():
    for lock in locks:
        lock.acquire()
    threads.begin(model, "call", model)
    inside.set()
    threading.Event().wait()  # it holds them as long as the process lives
threading.Thread(target=draws, daemon=True).start()
inside.wait()
pid = os.fork()
if not pid:
    free = all(lock.acquire(timeout=1) for lock in locks)
    threads.check_idle(model, "set")
    os._exit(0 if free else 3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_that_forks_while_a_thread_merges_can_change_merging() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
