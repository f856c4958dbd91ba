"""Test that a pipeline whose denoiser was replaced after `apply_mame` raises when it is called."""

from __future__ import annotations

import contextlib
import copy
import io
import weakref
from typing import Any

import pytest
import torch

from mame_sd import NothingMergedError, apply_mame, remove_mame
from tests.builders.pipelines import once
from tests.builders.tiny import tiny_pipeline

MERGING = {"keep": 0.5, "min_tokens": 40}
TOLD = r"on pipe\.unet, but it is another UNet2DConditionModel .* or remove_mame\(pipe\): nothing"


def other() -> Any:
    return tiny_pipeline().unet


def check_refused(pipe: Any) -> None:
    with pytest.raises(NothingMergedError, match=TOLD):
        once(pipe)


def test_a_call_with_another_denoiser_is_refused_until_merging_is_applied_again() -> None:
    pipe = tiny_pipeline()
    plain = once(pipe)
    apply_mame(pipe, **MERGING)  # nobody holds the handle
    merged = once(pipe)
    pipe.unet = other()
    check_refused(pipe)
    apply_mame(pipe, **MERGING)
    assert torch.equal(once(pipe), merged)
    pipe.unet = other()
    remove_mame(pipe)
    assert torch.equal(once(pipe), plain)
    assert "_mame_check" not in vars(pipe)


@pytest.mark.parametrize("removed", ["pipe", "model", "handle", "block"])
def test_nothing_is_told_once_merging_is_removed(removed: str) -> None:
    pipe = tiny_pipeline()
    plain = once(pipe)
    if removed == "block":
        with apply_mame(pipe, **MERGING):
            assert "_mame_check" in vars(pipe)
    else:
        handle = apply_mame(pipe, **MERGING)
        if removed == "handle":
            handle.remove()
        else:
            remove_mame(pipe if removed == "pipe" else pipe.unet)
    pipe.unet = other()
    assert torch.equal(once(pipe), plain)
    assert "_mame_check" not in vars(pipe)


def test_a_copy_that_merges_and_a_wrapper_may_take_the_place() -> None:
    pipe = tiny_pipeline()
    apply_mame(pipe, **MERGING)
    merged = once(pipe)
    pipe.unet = copy.deepcopy(pipe.unet)
    assert torch.equal(once(pipe), merged)
    pipe.unet = torch.compile(pipe.unet, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(once(pipe), merged)


@pytest.mark.parametrize("copied", ["deepcopy", "saved whole"])
def test_a_copy_is_checked_by_itself(copied: str) -> None:
    pipe = tiny_pipeline()
    apply_mame(pipe, **MERGING)
    merged = once(pipe)
    if copied == "deepcopy":
        twin = copy.deepcopy(pipe)
    else:
        file = io.BytesIO()
        torch.save(pipe, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(once(twin), merged)
    twin.unet = other()
    check_refused(twin)
    assert torch.equal(once(pipe), merged)
    remove_mame(twin)
    once(twin)


def test_a_shallow_copy_has_denoisers_of_its_own() -> None:
    pipe = tiny_pipeline()
    plain = once(pipe)
    apply_mame(pipe, **MERGING)
    merged, twin = once(pipe), copy.copy(pipe)
    twin.unet = other()
    check_refused(twin)
    assert torch.equal(once(pipe), merged)
    for denoising in (twin, pipe):  # in a loop of the user's own, which has no `self`
        told = pytest.raises(NothingMergedError, match=TOLD)
        with told if denoising is twin else contextlib.nullcontext():
            list(lone_steps(denoising))
    remove_mame(pipe)
    assert torch.equal(once(twin), plain)
    assert "_mame_check" not in vars(twin)


def lone_steps(pipeline: Any) -> Any:
    return pipeline.progress_bar(range(2))


def test_a_progress_bar_of_the_users_stays() -> None:
    pipe, seen = tiny_pipeline(), []
    own = pipe.progress_bar

    def progress_bar(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return own(*args, **kwargs)

    pipe.progress_bar = progress_bar
    apply_mame(pipe, **MERGING)
    once(pipe)
    assert seen
    remove_mame(pipe)
    assert pipe.progress_bar is progress_bar


def test_a_pipeline_that_merges_is_freed_with_its_last_name() -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, **MERGING)
    gone = weakref.ref(pipe)
    del pipe
    assert gone() is None
    assert handle.pipe is None
