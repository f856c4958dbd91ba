"""Keys and values in joint and rotary attention: each family against float64 loops, its text exact,
in one graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import PAGCFGHunyuanAttnProcessor2_0
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode

from mame_sd import MaMeConfig, NothingMergedError, apply_mame
from mame_sd.config import Study
from mame_sd.core.partition import positions
from mame_sd.core.reference import ReferencePlan, reference_plan
from mame_sd.diffusion.families.transformers import family_of
from mame_sd.diffusion.families.unet import NOT_COUNTED
from mame_sd.diffusion.layer import NO_DETAIL, NO_SIZE
from mame_sd.families import Family, Tokens, register_family
from tests.builders.settings import nested
from tests.builders.tiny import seeded
from tests.matrix.transformers import ROWS, TEXT, H, W, normal

# Where the image's keys begin in each attention that merges (by the number of keys), and the frames
# of a video.
FIRST: dict[str, dict[int, int]] = {
    "HunyuanDiT": {96: 0},
    "Lumina-Next": {96: 0},
    "Stable Diffusion 3": {96 + TEXT: 0},
    "Stable Diffusion 3.5": {96 + TEXT: 0, 96: 0},
    "Flux": {96 + TEXT: TEXT},
    "Flux Kontext": {96 + 20 + TEXT: TEXT},
    "Chroma": {96 + TEXT: TEXT},
    "Qwen-Image": {96 + TEXT: TEXT},
    "AuraFlow": {96 + TEXT + 8: TEXT + 8},
    "Wan (video)": {288: 0},
    "LTX-Video": {288: 0},
    "CogVideoX": {288 + TEXT: TEXT},
}
EVERY = {row.name: row for row in ROWS if row.name in FIRST}
every_family = pytest.mark.parametrize("name", EVERY)
FIELDS: dict[str, dict[str, Any]] = {
    "own": {"keep": 0.5, "stride": (2, 2)},  # samples keep tokens of their own
    "same": {"keep": 0.25},
    "tau": {"tau": 0.1, "merge": "kv"},
    "pick": {"keep": 0.25, "weights": "pick"},
    "pick-own": {"keep": 0.5, "stride": (2, 2), "weights": "pick"},
    "correct": {"keep": 0.25, "weights": "pick", "correct": True},
    "correct-average": {"keep": 0.5, "stride": (2, 2), "weights": "average", "correct": True},
    "plain": {"keep": 0.25, "correct": False},
}


class Record(TorchFunctionMode):
    """Notes the keys of every attention over an image's tokens."""

    def __init__(self, lengths: Any) -> None:
        super().__init__()
        self.lengths, self.keys = set(lengths), list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            key = kwargs["key"] if "key" in kwargs else args[1]
            query = kwargs["query"] if "query" in kwargs else args[0]
            if query.shape[-2] in self.lengths and key.shape[-2] not in (
                TEXT,
                2 * TEXT,
            ):  # cross-attention
                self.keys.append(key)
        return func(*args, **kwargs)


class Loops(TorchFunctionMode):
    """Attention over an image's tokens, its keys and values merged by plain loops; features come
    from the layers' inputs.
    """

    def __init__(self, first: dict[int, int], config: MaMeConfig) -> None:
        super().__init__()
        self.first, self.config, self.features = first, config, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = {
            **dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)),
            **(kwargs or {}),
        }
        if func is not F.scaled_dot_product_attention or call["key"].shape[-2] not in self.first:
            return func(*args, **(kwargs or {}))
        query, key, value = (call[part].double() for part in ("query", "key", "value"))
        heads = query.shape[1]
        key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
        n = 288 if key.shape[-2] >= 288 else 96
        times, start = n // (H * W), self.first[key.shape[-2]]
        order = (
            torch.arange(n).view(times, H, W).permute(1, 0, 2).flatten()
        )  # of the plane: rows of frames in turns
        plan = reference_plan(self.features.pop(0)[:, order], self.config, (H * times, W))
        kept = [plan.dst + [plan.src[j] for j in plan.preserved[b]] for b in range(query.shape[0])]
        whole = [
            [*range(start), *(order[k] + start).tolist(), *range(start + n, key.shape[-2])]
            for k in kept
        ]
        out = []
        for b, columns in enumerate(whole):
            merged = []
            for part in (key, value):
                image = plan.merge(part[:, :, start:][:, :, order].transpose(1, 2).flatten(2))[b]
                image = image.unflatten(1, (heads, -1)).transpose(0, 1)
                merged.append(torch.cat([part[b, :, :start], image, part[b, :, start + n :]], 1))
            scale = call.get("scale") or query.shape[-1] ** -0.5
            logits = query[b] @ merged[0].transpose(1, 2) * scale
            sizes = torch.ones(len(columns)).double()
            stay = len(plan.preserved[b])
            picked = torch.full((len(plan.dst),), (n - stay) / len(plan.dst)).double()
            sizes[start : start + len(plan.dst)] = (
                picked if self.config.weights == "pick" else plan.counts[b]
            )
            weighs = key.shape[-2] > n or stay > 0 or self.config.tau is not None
            # beside text and beside keys of their own, merged keys weigh as much as the keys they
            # stand for
            if weighs:
                logits = logits + sizes.log()
            mask = call.get("attn_mask")
            if mask is not None:
                mask = mask.expand(query.shape[0], *mask.shape[1:])[b][..., columns]
                logits = (
                    logits.masked_fill(~mask, -torch.inf)
                    if mask.dtype == torch.bool
                    else logits + mask
                )
            out.append(
                torch.softmax(logits, -1).nan_to_num() @ merged[1]
            )  # padding's rows are masked throughout
            if self.config.correct and mask is None:
                shares = (sizes if weighs else torch.ones_like(sizes))[:, None]
                shares = shares / shares.sum()
                mean, mean_kept = (
                    value[b].mean(1, keepdim=True),
                    (merged[1] * shares).sum(1, keepdim=True),
                )
                whole_moment = value[b].transpose(1, 2) @ key[b] / key.shape[-2]
                moment = whole_moment - (merged[1] * shares).transpose(1, 2) @ merged[0]
                outer = mean.transpose(1, 2) @ key[b].mean(1, keepdim=True)
                outer = outer - mean_kept.transpose(1, 2) @ (merged[0] * shares).sum(
                    1, keepdim=True
                )
                lacking = moment - outer
                if (
                    self.config.weights == "best"
                ):  # what varies within groups is estimated from a sample of the tokens
                    lacking = lacking - self.within(
                        plan, b, merged, key[b], value[b], start, order, every=True
                    )
                    lacking = lacking + self.within(
                        plan, b, merged, key[b], value[b], start, order, every=False
                    )
                out[-1] = out[-1] + scale * query[b] @ lacking.transpose(1, 2) + mean - mean_kept
        return torch.stack(out).to(call["query"].dtype)

    def within(
        self,
        plan: ReferencePlan,
        b: int,
        merged: list[Tensor],
        key: Tensor,
        value: Tensor,
        start: int,
        order: Tensor,
        every: bool,
    ) -> Tensor:
        """Cov(v, k) [heads, D, D] within groups of the image's tokens, as a share of all keys.

        It is over every token, or estimated from the sample.
        """
        rows = dict(zip(plan.dst, range(len(plan.dst)), strict=True))
        for j, position in enumerate(plan.src):
            stays = j in plan.preserved[b]
            rows[position] = (
                len(plan.dst) + plan.preserved[b].index(j)
                if stays
                else int(plan.weights[b, :, j].argmax())
            )
        size = (len(order) // W, W)
        chosen = (
            range(len(order)) if every else positions(len(order), self.config, size).sample.tolist()
        )
        parts = [torch.zeros(key.shape[0], key.shape[2], key.shape[2]).double() for _ in range(2)]
        for n, position in enumerate(chosen):
            apart = [
                whole[:, order[position] + start] - few[:, rows[position] + start]
                for whole, few in zip((key, value), merged, strict=True)
            ]
            parts[2 * n // len(chosen)] += (
                apart[1][:, :, None] * apart[0][:, None, :] / (len(chosen) / 2)
            )
        found = (parts[0] + parts[1]) / 2
        agree = (parts[0] * parts[1]).sum((1, 2), keepdim=True) / found.square().sum(
            (1, 2), keepdim=True
        )
        return found * (1.0 if every else agree.clamp(0, 1)) * len(order) / key.shape[1]


def layers_of(model: nn.Module, names: list[str]) -> list[nn.Module]:
    return [model.get_submodule(name) for name in names]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "own") for name in EVERY),
        *((n, f) for n in ("Flux", "Wan (video)") for f in FIELDS if f != "own"),
    ],
)
def test_equals_float64_loops(name: str, form: str) -> None:
    row, fields = EVERY[name], FIELDS[form]
    model = row.build()
    if name != "Lumina-Next":  # its rotary positions are complex64
        model = model.double()
    config = MaMeConfig(**nested({**fields, "redraw": False}), min_tokens=60)
    handle = apply_mame(model, config)
    inputs = {key: _double(value, name) for key, value in row.run.args[0].items()}
    with torch.no_grad():
        got = model(**inputs, return_dict=False)[0]
    report = handle.report()
    assert [layer.merged for layer in report.layers] == [True] * sum(row.merges.values())
    handle.remove()
    loops = Loops(FIRST[name], config)
    for module in layers_of(model, [layer.name for layer in report.layers]):
        module.register_forward_pre_hook(
            lambda module, args, kwargs: loops.features.append(_image(args, kwargs)),
            with_kwargs=True,
        )
    with torch.no_grad(), loops:
        expected = model(**inputs, return_dict=False)[0]
    tolerance = 1e-4 if name == "Lumina-Next" else 1e-9
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def _image(args: Any, kwargs: Any) -> Tensor:
    """The image's tokens of an attention's input: those behind the text where both share a
    sequence.
    """
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    n = 288 if hidden.shape[1] >= 288 else 96
    first = {96 + 20: 0, 96 + 20 + TEXT: TEXT}.get(hidden.shape[1], hidden.shape[1] - n)
    return hidden[:, first : first + n]


def _double(value: Any, name: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_double(part, name) for part in value)
    floats = isinstance(value, Tensor) and value.dtype == torch.float32 and name != "Lumina-Next"
    return value.double() if floats else value


@every_family
def test_text_is_exact_and_samples_run_together(name: str) -> None:
    """The first layer's text keys are bit-equal to those without merging, of the whole batch in one
    call.
    """
    row = EVERY[name]
    model = row.build()
    keys = []
    for merging in (False, True):
        if merging:
            apply_mame(model, keep=0.5, study=Study(stride=(2, 2), redraw=False), min_tokens=60)
        with Record(FIRST[name]) as record:
            row.run(model)
        keys.append(record.keys)
    plain, merged = keys
    assert len(plain) == len(merged) == sum(row.merges.values())
    n, first = (288 if plain[0].shape[-2] >= 288 else 96), FIRST[name][plain[0].shape[-2]]
    assert merged[0].shape[:2] == plain[0].shape[:2]
    assert merged[0].shape[-2] == plain[0].shape[-2] - n // 2
    assert torch.equal(merged[0][:, :, :first], plain[0][:, :, :first])
    assert torch.equal(merged[0][:, :, first + n // 2 :], plain[0][:, :, first + n :])


def shortened(model: nn.Module) -> nn.Module:
    """One block of each kind, for tracing takes seconds a block."""
    for name, blocks in model.named_children():
        if isinstance(blocks, nn.ModuleList):
            setattr(model, name, blocks[:1])
    return model


TRACED = [  # Stable Diffusion 3.5 has what 3 has
    *((name, {}) for name in EVERY if name not in ("Flux", "Stable Diffusion 3")),
    ("Flux", {"weights": "pick"}),
]


@pytest.mark.parametrize(("name", "fields"), TRACED)
def test_one_graph(name: str, fields: dict[str, Any]) -> None:
    """Merging breaks no graph, adds none but the small one of the hook that reads the step, and
    compiles once.
    """
    row = EVERY[name]
    model = row.build()
    if name != "Stable Diffusion 3.5":  # whose last block has attention of its own
        model = shortened(model)
    handle = apply_mame(model, keep=0.5, **nested({"stride": (2, 2), **fields}), min_tokens=60)
    expected = row.run(model)
    torch._dynamo.reset()
    counters.clear()
    model.compile(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            torch.testing.assert_close(row.run(model), expected, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert all(layer.merged for layer in handle.report().layers)


def test_gradients_are_those_of_the_loops() -> None:
    row = EVERY["Flux"]
    model = row.build().double()
    config = MaMeConfig(keep=0.5, study=Study(stride=(2, 2)), min_tokens=60)
    inputs = {key: _double(value, "Flux") for key, value in row.run.args[0].items()}
    image = inputs["hidden_states"].requires_grad_()
    handle = apply_mame(model, config)
    (got,) = torch.autograd.grad(model(**inputs, return_dict=False)[0].square().sum(), image)
    names = [layer.name for layer in handle.report().layers]
    handle.remove()
    loops = Loops(FIRST["Flux"], config)
    for module in layers_of(model, names):
        module.register_forward_pre_hook(
            lambda module, args, kwargs: loops.features.append(_image(args, kwargs)),
            with_kwargs=True,
        )
    with loops:
        (expected,) = torch.autograd.grad(
            model(**inputs, return_dict=False)[0].square().sum(), image
        )
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    row = EVERY["Flux"]
    model = row.build()
    apply_mame(model, keep=0.5, study=Study(stride=(2, 2)), min_tokens=60)
    whole = row.run(model)
    half = {
        key: value.to(dtype) if value.dim() == 3 else value
        for key, value in row.run.args[0].items()
    }
    with torch.no_grad():
        output = model.to(dtype)(
            **{**half, "pooled_projections": half["pooled_projections"].to(dtype)},
            return_dict=False,
        )[0]
    assert output.dtype == dtype
    assert (output.float() - whole).norm() / whole.norm() < 0.1


def test_a_processor_that_attends_to_parts_of_the_batch_merges_queries_too_and_says_so() -> None:
    row = EVERY["HunyuanDiT"]
    model = row.build()
    for block in model.blocks:
        block.attn1.set_processor(PAGCFGHunyuanAttnProcessor2_0())
    inputs = {key: _thrice(value) for key, value in row.run.args[0].items()}
    handle = apply_mame(model, keep=0.25, min_tokens=60)
    with torch.no_grad():
        model(**inputs, return_dict=False)
    reason = "queries merge too: PAGCFGHunyuanAttnProcessor2_0 attends to parts of the batch"
    assert {layer.reason for layer in handle.report().layers} == {reason}
    handle.set(study=Study(weights="pick"))
    handle.reset()
    with torch.no_grad():
        model(**inputs, return_dict=False)
    with pytest.raises(
        NothingMergedError,
        match="attends to parts of the batch, where picking would drop queries too",
    ):
        handle.report()


def _thrice(value: Any) -> Any:
    return (
        torch.cat([value, value[:1]])
        if isinstance(value, Tensor) and value.shape[0] == 2
        else value
    )


class Eager(nn.Module):
    """Attention without scaled_dot_product_attention."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


class EagerModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Eager()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def test_attention_that_hides_its_keys_counts_merged_tokens_once_and_says_so() -> None:
    register_family(
        Family(
            "eager", ("EagerModel",), ("Eager",), lambda model, call: Tokens((8, 8)), inputs=("x",)
        )
    )
    model = seeded(EagerModel, 0)
    handle = apply_mame(model, keep=0.4, merge="qkv", min_tokens=1)
    model(normal(2, 64, 8))
    assert [layer.reason for layer in handle.report().layers] == [NOT_COUNTED.format("Eager")]


def test_attention_that_hides_its_keys_merges_queries_too_and_says_so() -> None:
    register_family(
        Family(
            "eager", ("EagerModel",), ("Eager",), lambda model, call: Tokens((8, 8)), inputs=("x",)
        )
    )
    model, x = seeded(EagerModel, 0), normal(2, 64, 8)
    handle = apply_mame(model, keep=0.5, min_tokens=1, study=Study(redraw=False))
    outputs = [model(x), model(x)]
    reason = (
        "queries merge too: Eager calls no scaled_dot_product_attention over all of the layer's"
        " tokens"
    )
    assert [layer.reason for layer in handle.report().layers] == [reason]
    handle.set(merge="qkv")
    assert torch.equal(model(x), outputs[0])
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], Eager()(x))


def test_a_joint_family_that_does_not_tell_where_text_stands_merges_queries_too_and_says_so() -> (
    None
):
    row = EVERY["Stable Diffusion 3"]
    model, told = row.build(), row.build()
    known = family_of(model)
    assert known is not None
    expected = []
    for one, family in ((model, replace(known, text_last=None)), (told, known)):
        register_family(family)
        handle = apply_mame(one, keep=0.5, min_tokens=60)
        expected.append(row.run(one))
        reasons = {layer.reason for layer in handle.report().layers}
        assert reasons == (
            {
                "queries merge too: the family Stable Diffusion 3 doesn't tell text_last, where the"
                " text's keys stand"
            }
            if one is model
            else {""}
        )
    assert not torch.equal(*expected)


PLACELESS = {"partition": "sequential", "tiles": 0}


@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        ({}, [NO_SIZE]),
        ({"merge": "qkv"}, [NO_SIZE, NO_DETAIL]),
        ({"merge": "qkv", "detail": False}, [NO_SIZE]),
        ({"tau": 0.5}, [NO_SIZE]),
        ({"merge": "qkv", "detail": True, "keep": 0.5, **PLACELESS}, [NO_DETAIL]),
        (PLACELESS | {"keep": 0.5}, [""]),
    ],
    ids=str,
)
def test_a_sequence_without_rows_and_columns_merges_without_them_and_says_so(
    fields: dict[str, Any], notes: list[str]
) -> None:
    row = EVERY["Flux"]
    model = row.build()
    known = family_of(model)
    assert known is not None
    register_family(
        replace(known, tokens=lambda model, call: Tokens((96,), before=TEXT), eager=False)
    )
    handle = apply_mame(model, min_tokens=60, **nested(fields))
    row.run(model)
    register_family(known)
    for layer in handle.report().layers:
        assert layer.merged
        assert layer.reason == ". ".join(notes)
