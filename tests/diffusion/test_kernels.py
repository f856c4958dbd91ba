"""Test that merged keys reach every attention kernel, whenever it is registered or selected."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

from mame_sd import NothingMergedError, apply_mame, remove_mame
from mame_sd.core.fit import SDPA
from mame_sd.core.intercept import MergeJob, SDPAInterceptor
from mame_sd.core.merge_keys import Grid, KeyMerging
from tests.builders.layers import attention
from tests.builders.tiny import one_level_unet, run_unet
from tests.builders.transformers import run as run_model
from tests.matrix.backends import dispatcher, stand_ins
from tests.matrix.models.case import BLC, case
from tests.matrix.models.images import HALF
from tests.matrix.models.watch import check_by_loop, merging

MERGING = {"keep": 0.5, "min_tokens": 60}
SEEN: list[tuple[int, int]] = []  # numbers of queries and keys in each call of a stand-in


@torch.library.custom_op("mame_tests::kernel", mutates_args=())
def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention [B, H, N, D] where graphs and function modes can't look inside."""
    SEEN.append((query.shape[2], key.shape[2]))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores.softmax(-1) @ value).contiguous()


@kernel.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(query)


def sage(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Compute attention as a backend [B, N, H, D] without a mask."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return kernel(q, k, v).transpose(1, 2)


def seen() -> set[int]:
    """Return the numbers of keys in the calls with the most queries since the last look."""
    most = max((queries for queries, _ in SEEN), default=0)
    counts = {keys for queries, keys in SEEN if queries == most and keys > 7}
    SEEN.clear()
    return counts


@pytest.fixture
def register() -> Iterator[Callable[[str], None]]:
    """Register the stand-in under a name, and restore the registry after the test."""
    SEEN.clear()
    torch._dynamo.reset()
    with dispatcher():
        yield lambda name: Registry.register(AttentionBackendName(name))(sage) and None


FLUX = case("FluxTransformer2DModel", lambda: HALF, BLC, num_layers=1)  # one block of each kind


def run(model: Any) -> Tensor:
    return run_model(FLUX.inputs(), model)


def whole(model: Any) -> int:
    """Return the number of keys of an unmerged layer."""
    with attention_backend("sage"):
        run(model)
    (count,) = seen()
    return count


def by_blocks(model: Any) -> Any:
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    return model


COMPILED: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "one graph": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "blocks": by_blocks,
}


@pytest.mark.compiles
@pytest.mark.parametrize(("registered", "how"), [("before", "blocks"), ("after", "one graph")])
def test_a_backend_that_is_set_gets_merged_keys(
    register: Callable[[str], None], registered: str, how: str
) -> None:
    model = FLUX.build()
    register("sage")
    every = whole(model)
    if registered == "after":
        del Registry._backends[AttentionBackendName("sage")]
    handle = apply_mame(model, **MERGING)
    if registered == "after":
        register("sage")
    model.set_attention_backend("sage")
    eager = run(model)
    (merged,) = seen()
    assert merged < every
    called = COMPILED[how](model)
    torch.testing.assert_close(run(called), eager, rtol=1e-4, atol=1e-4)
    assert seen() == {merged}
    assert {layer.reason.split(",")[0] for layer in handle.report().layers} == {"attention by sage"}
    remove_mame(model)
    run(model)
    assert seen() == {every}


def test_a_kernel_in_the_place_of_the_native_one_gets_merged_keys(
    register: Callable[[str], None],
) -> None:
    model = FLUX.build()
    register("native")
    run(model)
    (every,) = seen()
    handle = apply_mame(model, **MERGING)
    run(model)
    assert max(seen()) < every
    assert all(layer.merged for layer in handle.report().layers)


def replacement(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Ignore masks, as SageAttention does when it replaces PyTorch's function."""
    return kernel(query, key, value)


@pytest.mark.compiles
@pytest.mark.parametrize(("order", "how"), [("before", "eager"), ("after", "one graph")])
def test_what_stands_in_for_scaled_dot_product_attention_gets_merged_keys(
    monkeypatch: pytest.MonkeyPatch, how: str, order: str
) -> None:
    torch._dynamo.reset()
    unet = one_level_unet(transformer_layers_per_block=1)
    if order == "before":
        monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    handle = apply_mame(unet, keep=0.5, min_tokens=40)
    if order == "after":
        monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    SEEN.clear()
    expected = run_unet(unet)
    assert seen() == {128}
    torch.testing.assert_close(run_unet(COMPILED[how](unet)), expected, rtol=1e-4, atol=1e-4)
    assert seen() == {128}
    assert {layer.reason for layer in handle.report().layers} == {
        "attention by replacement, which takes no sizes of groups: their keys carry them"
    }
    remove_mame(unet)
    run_unet(unet)
    assert seen() == {256}


def test_a_lone_layer_that_was_saved_whole_merges_in_front_of_what_stands_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No hook on a model looks for kernels here; reading the file does."""
    attn, file = Attention(query_dim=32, heads=2, dim_head=16), io.BytesIO()
    apply_mame(attn, keep=0.5, min_tokens=60)
    torch.save(attn, file)
    file.seek(0)
    for name, module in list(sys.modules.items()):  # as in a process that has not merged yet
        if name.startswith("mame_sd.diffusion."):
            monkeypatch.delitem(sys.modules, name)
            package, _, own = name.rpartition(".")
            monkeypatch.setattr(f"{package}.{own}", module)  # restored in the end
    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    SEEN.clear()
    with torch.no_grad():
        torch.load(file, weights_only=False)(torch.randn(1, 256, 32))
    assert seen() == {128}


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Compute attention as a kernel of the user without a bias."""
    return kernel(q, k, v)


def biased(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **more: Any) -> Tensor:
    """Compute attention as a kernel of the user with a bias."""
    SEEN.append((q.shape[2], k.shape[2]))
    return SDPA(q, k, v, attn_mask=attn_mask, **more)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_kernels_of_the_page_compute_attention_over_merged_keys() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    model = FLUX.build()
    with apply_mame(model, **MERGING):
        expected = run(model)
    for code, apart in zip(
        re.findall(r"```python\n(.*?)```", page, re.S), (1e-2, 1e-5), strict=True
    ):
        scope = {"apply_mame": partial(apply_mame, **MERGING), "pipe": model}
        exec(code.replace("torch.compile(flex_attention)", "flex_attention"), scope)
        assert (run(model) - expected).abs().max() < apart * expected.abs().max()
        kernel = scope["handle"].report().layers[0].reason  # type: ignore[attr-defined]
        assert kernel.startswith("attention by with")


@pytest.mark.compiles
def test_a_kernel_of_the_user_computes_attention_over_merged_keys(
    register: Callable[[str], None],
) -> None:
    """Test kernels with and without a bias, in place of PyTorch's attention and of a backend."""
    register("sage")
    model = FLUX.build()
    every = whole(model)
    with apply_mame(model, **MERGING):
        counted = run(model)
    handle = apply_mame(model, kernel=biased, **MERGING)
    assert torch.equal(run(model), counted)
    assert {layer.reason for layer in handle.report().layers} == {"attention by biased"}
    handle = apply_mame(model, kernel=flash, **MERGING)
    SEEN.clear()
    expected = run(model)
    (kept,) = seen()
    assert kept < every
    assert {layer.reason for layer in handle.report().layers} == {
        "attention by flash, which takes no sizes of groups: their keys carry them"
    }
    with attention_backend("sage"):
        assert torch.equal(run(model), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(run(by_blocks(model)), expected, rtol=1e-4, atol=1e-4)
    remove_mame(model)
    SEEN.clear()
    run(model)
    assert not SEEN
    unet = one_level_unet()
    apply_mame(unet, keep=0.5, min_tokens=40, kernel=flash)
    run_unet(unet)
    assert seen() == {128}


class Layer(nn.Module):
    """Compute attention as a user's kernel that is a module and takes a bias."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
        return biased(q, k, v, attn_mask)


def test_kernels_that_are_modules_or_compiled() -> None:
    torch._dynamo.reset()
    unet = one_level_unet(transformer_layers_per_block=1)
    handle = apply_mame(unet, keep=0.5, min_tokens=40, kernel=Layer())
    run_unet(unet)
    assert {layer.reason for layer in handle.report().layers} == {"attention by Layer"}
    kernel = torch.compile(flash, backend="eager")
    handle = apply_mame(unet, keep=0.5, min_tokens=40, kernel=kernel)
    wanted = run_unet(unet)
    assert "no sizes of groups" in handle.report().layers[0].reason
    compiled = torch.compile(unet, backend="eager")
    torch.testing.assert_close(run_unet(compiled), wanted, rtol=1e-4, atol=1e-4)


def test_a_kernel_of_the_user_is_refused_where_it_can_do_nothing() -> None:
    unet = one_level_unet()
    handle = apply_mame(unet, kernel=flash, keep=0.5, min_tokens=40)
    for change in (
        lambda: apply_mame(unet, kernel=flash, tau=0.8),
        lambda: apply_mame(unet, kernel=flash, keep=0.5, layers={"*": {"tau": 0.3}}),
        lambda: handle.set(tau=0.8),
        lambda: handle.using(tau=0.8).__enter__(),
    ):
        with pytest.raises(ValueError, match="kernel: expected none with tau"):
            change()
    for kind in ("sage", nn.Identity, partial(SDPA, dropout_p=0.0)):
        with pytest.raises(TypeError, match="kernel: expected a function"):
            apply_mame(unet, kernel=kind)
    apply_mame(unet, keep=0.5, min_tokens=40, kernel=lambda q, k, v: (q, None))
    with pytest.raises(ValueError, match=r"kernel: expected it to give a tensor \[.*, got tuple"):
        run_unet(unet)


class Written(AttnProcessor):
    """Compute the softmax in plain operations, which can't be intercepted."""


TOLD = r"no layer merges: each of 2 was left alone \(Written calls no attention"


def test_a_forward_that_merges_nothing_warns_whenever_that_begins() -> None:
    """The warning comes once, and again after something has merged in between."""
    unet = one_level_unet()
    handle = apply_mame(unet, keep=0.5, min_tokens=40)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run_unet(unet)
        unet.set_attn_processor(Written())
        with pytest.warns(UserWarning, match=TOLD):
            run_unet(unet)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run_unet(unet)
        with pytest.raises(NothingMergedError, match="Written calls no attention over"):
            handle.report()
        unet.set_attn_processor(AttnProcessor2_0())


@pytest.mark.compiles
def test_a_compiled_forward_that_merges_nothing_warns() -> None:
    torch._dynamo.reset()
    unet = one_level_unet(transformer_layers_per_block=1)
    apply_mame(unet, keep=0.5, min_tokens=40)
    unet.set_attn_processor(Written())
    with pytest.warns(UserWarning, match=TOLD.replace("2", "1")):
        run_unet(torch.compile(unet, backend="eager", fullgraph=True))


def masked_call() -> tuple[MergeJob, tuple[Tensor, ...], Tensor]:
    """Return a job for 4 x 6 tokens after 3 of text, q, k, v [2, 2, 27, 8], and a mask."""
    job = MergeJob((Grid(3, (4, 6), 0.5),), 27, 3, 24, KeyMerging())
    seen = torch.ones(2, 1, 1, 27, dtype=torch.bool)
    seen[1, ..., :2] = False
    qkv = torch.randn(3, 2, 2, 27, 8, generator=torch.Generator().manual_seed(0)).unbind()
    return job, qkv, seen


def test_a_backend_may_be_given_a_mask_for_all_heads_and_queries() -> None:
    """Give the mask as [B, N], which diffusers' dispatcher accepts."""
    job, qkv, seen = masked_call()
    with stand_ins() as called, merging() as calls:
        apply_mame(attention(), min_tokens=1)  # from now on backends are watched
        with SDPAInterceptor(job):
            dispatch_attention_fn(
                *(t.transpose(1, 2) for t in qkv),
                attn_mask=seen[:, 0, 0],
                backend=AttentionBackendName("xformers"),
            )
    assert called == ["xformers"]
    (call,) = calls
    check_by_loop(call)
    assert torch.equal(call.changed["attn_mask"] == -torch.inf, ~seen[..., : 3 + 12])


def test_a_kernel_that_takes_no_numbers_is_given_a_boolean_mask() -> None:
    job, (q, k, v), seen = masked_call()
    call = {"query": q, "key": k, "value": v, "attn_mask": seen}
    changed = job.merge(call, list(job.grids), 3, bias=False)
    assert changed is not None
    assert torch.equal(changed["attn_mask"], seen[..., : 3 + 12])


def test_a_mask_that_differs_among_queries_within_the_image_merges_nothing() -> None:
    job, (q, k, v), _ = masked_call()
    apart = (torch.arange(27)[:, None] - torch.arange(27)).abs() < 9
    with SDPAInterceptor(job):
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=apart)
    assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, attn_mask=apart))
    assert job.merged is None
    assert (
        job.left == "an attention mask with a row for each query, in which the image's keys differ"
    )


def test_one_head_without_a_dimension_of_its_own_keeps_the_masks_of_its_samples() -> None:
    job, qkv, seen = masked_call()
    q, k, v = (t[:, 0] for t in qkv)
    mask = seen[:, 0].expand(2, 27, 27)
    with SDPAInterceptor(job):
        alone = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        four = (t.unsqueeze(1) for t in (q, k, v))
        want = F.scaled_dot_product_attention(*four, attn_mask=mask.unsqueeze(1))
    assert job.merged is not None
    torch.testing.assert_close(alone, want.squeeze(1))


def test_a_backend_may_be_registered_by_a_plain_name(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_mame(attention(), min_tokens=1)
    monkeypatch.setitem(Registry._backends, "mine", lambda query, key, value: value)
    q = torch.zeros(1, 4, 2, 8)
    assert Registry._backends["mine"](query=q, key=q, value=q) is q
