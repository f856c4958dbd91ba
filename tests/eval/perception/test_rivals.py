"""Rivals compared with their papers in float64 loops on every class of models, and their FLOPs."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mame_sd.eval.perception.methods import smaller
from mame_sd.eval.perception.rivals import on_smaller_images, rival_on
from mame_sd.eval.perception.rules import (
    BlockTokens,
    EViT,
    RandomDrop,
    Rule,
    ToMe,
    bipartite_soft_matching,
    class_attention,
)
from mame_sd.perception.apply_encoder import has_encoder_hooks
from mame_sd.perception.encoder_registry import find_encoder
from mame_sd.runs.merging import NotApplicable
from tests.builders.perception import EVERY, PATCHES, ROWS, SIDE, Row

NAME = operator.attrgetter("name")
# Of each way in which positions are interpolated, with a text half, and with noise for patches.
SMALLER = (
    "ViTModel",
    "ViTMAE",
    "DeiTForImageClassification",
    "Dinov2Model",
    "CLIPModel",
    "SiglipV",
)
# Of each way in which blocks attend: apart and joined projections, without a class token, clips.
SOME = ("ViTModel", "SiglipVisionModel", "Dinov2Model, SwiGLU", "timm ViT", "VideoMAE")
some = pytest.mark.parametrize("row", [one for one in EVERY if str(one.id).startswith(SOME)])
VIT = next(row for row in ROWS if row.name == "ViTModel")
rules = pytest.mark.parametrize(
    "rule", [Rule(), ToMe(5), EViT(0.7), RandomDrop(0.5)], ids=lambda rule: type(rule).__name__
)


def tome_by_loops(
    x: Tensor, metric: Tensor, sizes: Tensor, r: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """Merge x [L, C] by metric [L, d] and sizes [L] as section 3 of ToMe's paper says."""
    tokens = range(prefix, len(x))
    a, b = [n for n in tokens if n % 2 == 0], [n for n in tokens if n % 2 == 1]
    edges = []
    for source in a:
        cosine = [
            (metric[source] @ metric[n]) / (metric[source].norm() * metric[n].norm()) for n in b
        ]
        best = max(range(len(b)), key=lambda n: float(cosine[n]))
        edges.append((float(cosine[best]), source, b[best]))
    edges.sort(key=lambda edge: -edge[0])
    merging, rest = edges[:r], [source for _, source, _ in edges[r:]]
    rest = sorted(rest) if prefix else rest
    groups = [[n] for n in [*range(prefix), *rest]]
    groups += [[n, *(source for _, source, target in merging if target == n)] for n in b]
    merged = [
        sum(sizes[n] * x[n] for n in group) / sum(sizes[n] for n in group) for group in groups
    ]
    return torch.stack(merged), torch.stack([sum(sizes[n] for n in group) for group in groups])


def vit_by_loops(model: Any, pixels: Tensor, r: int) -> Tensor:
    """Compute the last hidden state of a transformers ViT under ToMe, sample by sample."""
    rows = []
    for image in pixels:
        x = model.embeddings(image[None])[0]
        sizes = torch.ones(len(x), dtype=x.dtype)
        prefix = len(x) - PATCHES
        for block in model.layers if hasattr(model, "layers") else model.encoder.layer:
            normed, at = block.layernorm_before(x), block.attention
            width = x.shape[1] // model.config.num_attention_heads
            heads = [
                [part(normed).split(width, 1)[head] for part in (at.q_proj, at.k_proj, at.v_proj)]
                for head in range(model.config.num_attention_heads)
            ]
            keys = [key for _, key, _ in heads]
            out = []
            for query, key, value in heads:
                logits = query @ key.T / math.sqrt(width) + sizes.log()
                out.append(logits.softmax(-1) @ value)
            y = x + at.o_proj(torch.cat(out, 1))
            fewer = min(r, (len(x) - prefix) // 2)
            x, sizes = tome_by_loops(y, sum(keys) / len(keys), sizes, fewer, prefix)
            x = x + block.mlp(block.layernorm_after(x))
        rows.append(model.layernorm(x))
    return torch.stack(rows)


@pytest.mark.parametrize(("prefix", "r"), [(0, 6), (1, 1), (2, 6)])
def test_matching_is_that_of_plain_loops(prefix: int, r: int) -> None:
    generator = torch.Generator().manual_seed(prefix * 10 + r)
    x, metric, sizes = (
        torch.randn(3, prefix + 13, n, generator=generator).double() for n in (8, 4, 1)
    )
    sizes = sizes.abs() + 1
    merge = bipartite_soft_matching(metric, r, prefix)
    summed, size = merge(x * sizes), merge(sizes)
    assert summed.shape[1] == prefix + 13 - r
    for sample in range(3):
        want, want_sizes = tome_by_loops(x[sample], metric[sample], sizes[sample, :, 0], r, prefix)
        torch.testing.assert_close(summed[sample] / size[sample], want)
        torch.testing.assert_close(size[sample, :, 0], want_sizes)
    torch.testing.assert_close(size.sum(1), sizes.sum(1))
    members = merge(torch.eye(prefix + 13).expand(3, -1, -1))  # [B, L', L]
    kept = ToMe(r)(BlockTokens(x, prefix, 0, keys=metric.unsqueeze(1), capturing=True)).kept
    assert torch.equal(members.argmax(-1), kept)


@pytest.mark.parametrize("r", [5, 12])
@torch.no_grad()
def test_tome_in_a_vit_is_that_of_plain_loops(r: int) -> None:
    model, pixels = VIT.build().double(), VIT.batch()["pixel_values"].double()
    with rival_on(model, ToMe(r)) as handle:
        got = model(pixels).last_hidden_state
        kept = [block.tokens_kept for block in handle.report().layers]
    # of 37 tokens, never more than half of the patches
    assert kept == ([32, 27, 22, 17] if r == 5 else [25, 13, 7, 4])
    torch.testing.assert_close(got, vit_by_loops(model, pixels, r))


@pytest.mark.parametrize("prefix", [1, 2])
def test_pruning_by_the_class_tokens_attention_is_that_of_plain_loops(prefix: int) -> None:
    generator = torch.Generator().manual_seed(prefix)
    x = torch.randn(2, prefix + 9, 8, generator=generator).double()
    queries, keys = torch.randn(2, 2, 2, prefix + 9, 4, generator=generator).double()
    got = EViT(0.6)(BlockTokens(x, prefix, 0, queries=queries, keys=keys)).x
    for sample in range(2):
        logits = [
            key @ query[0] / 2 for query, key in zip(queries[sample], keys[sample], strict=True)
        ]
        weight = sum(one.softmax(0)[prefix:] for one in logits) / 2
        order = sorted(range(9), key=lambda n: -float(weight[n]))
        want = [*x[sample, :prefix], *(x[sample, prefix + n] for n in order[:6])]  # ceil(5.4)
        want += [sum(weight[n] * x[sample, prefix + n] for n in order[6:])]
        torch.testing.assert_close(got[sample], torch.stack(want))


@torch.no_grad()
def test_queries_and_keys_are_those_of_the_attention() -> None:
    """EViT's weights are the probabilities that eager attention gives."""
    model, pixels = VIT.build(), VIT.batch()["pixel_values"]
    model.set_attn_implementation("eager")
    seen: list[Tensor] = []

    class Spy(EViT):
        def __call__(self, given: BlockTokens) -> Any:
            seen.append(class_attention(given))
            return super().__call__(given)

    with rival_on(model, Spy(1.0)):
        model(pixels)
    want = model(pixels, output_attentions=True).attentions
    for got, block in zip(seen, (1, 2, 3), strict=True):
        torch.testing.assert_close(got, want[block][:, :, 0, 1:].mean(1))


def test_random_dropping_keeps_other_patches_for_each_sample_and_the_same_ones_again() -> None:
    x = torch.arange(1 + 40.0).view(1, 41, 1).expand(3, -1, -1)
    one, two, later = (RandomDrop(0.5)(BlockTokens(x, 1, place)).x for place in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, later)
    assert not torch.equal(one[0], one[1])
    assert one.shape == (3, 21, 1)
    assert (one[:, 0] == 0).all()
    assert (one.diff(dim=1) > 0).all()
    assert RandomDrop(0.5, seed=1)(BlockTokens(x, 1, 0)).x.tolist() != one.tolist()


@some
@rules
@torch.no_grad()
def test_flops_are_those_of_the_operations_that_run_and_the_model_is_left_as_it_was(
    row: Row, rule: Rule
) -> None:
    model, inputs = row.build().requires_grad_(False), row.batch(1)
    before = row.call(model, inputs)
    if isinstance(rule, EViT) and row.prefix == 0:
        with pytest.raises(NotApplicable, match="choose another method"), rival_on(model, rule):
            pass
        return
    encoder, counter = find_encoder(model)[0], FlopCounterMode(display=False)
    with rival_on(model, rule) as handle:
        row.call(model, inputs)
        handle.reset()
        hooks = [
            encoder.register_forward_pre_hook(lambda *_: counter.__enter__() and None),
            encoder.register_forward_hook(lambda *_: counter.__exit__(None, None, None)),
        ]
        with sdpa_kernel(SDPBackend.MATH):
            row.call(model, inputs)
        for hook in hooks:
            hook.remove()
        report = handle.report()
    assert report.flops == counter.get_total_flops() / 2
    left, whole = report.layers[-1].tokens_kept, report.layers[0].tokens_in
    assert left < whole or (type(rule) is Rule and left == whole)
    assert not has_encoder_hooks(model)
    after = row.call(model, inputs)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.startswith(SMALLER)], ids=NAME)
@torch.no_grad()
def test_smaller_images(row: Row) -> None:
    model, inputs = row.build(), row.batch(2)
    before = row.call(model, inputs)
    if "noise" in inputs:
        inputs["noise"] = inputs["noise"][:, : PATCHES // 4]
    with smaller(SIDE // 2).counting(model) as handle:
        row.call(model, inputs)
        left = 6 if "noise" in inputs else PATCHES // 4
        assert handle.report().layers[0].tokens_in == row.prefix + left
    if "noise" not in inputs:
        with on_smaller_images(model, SIDE):
            same = row.call(model, inputs)
        after = row.call(model, inputs)
        for name, value in before.items():
            assert torch.equal(after[name], value)
            torch.testing.assert_close(same[name], value, rtol=1e-3, atol=1e-3)
