"""The node on a UNet's self-attention, compared with `apply_mame`; inputs, refusals and logs."""

from __future__ import annotations

import copy
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

from mame_sd import MaMeConfig, apply_mame
from mame_sd.core.guidance import partition_index
from mame_sd.refused import COMFYUI
from tests.builders.tiny import LATENT, TEXT_DIM, seeded, tiny_unet
from tests.comfyui.interface import (
    Model,
    UNetModel,
    applied,
    attention_pytorch,
    network,
    optimized_attention,
)

H, W = 8, 12
# Sigma of the first draw.
FIRST = next(t for t in range(1, 999) if int(partition_index(t)) == 0) / 1000
CUT = "another node has merged or cut the queries (such as ToMe or HyperTile)"
REPLACED = "another node replaces the attention of a block (such as PAG or SAG)"
KEEP, TAU = {"keep": 0.5}, {"mode": "tau", "tau": 0.1}


@pytest.fixture(scope="module")
def block() -> BasicTransformerBlock:
    return seeded(
        BasicTransformerBlock,
        0,
        dim=16,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
    )


@pytest.fixture
def model(block: BasicTransformerBlock) -> Model:
    return Model(UNetModel(block))


def tokens(length: int = H * W, seed: int = 1) -> Tensor:
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("size", [(H, W), (5, 8)], ids=str)  # an odd latent's lower level
@pytest.mark.parametrize("value", [{"keep": 0.25}, {"keep": 0.4}, {"tau": 0.1}], ids=str)
def test_node_is_apply_mame(
    node: Any, model: Model, block: Any, value: dict[str, float], size: tuple[int, int]
) -> None:
    n, (mode,) = tokens(math.prod(size)), value
    before = model.self_attention(n, size)
    patched = applied(node, model, mode=mode, **value)
    attn = copy.deepcopy(block.attn1)
    apply_mame(attn, **value, min_tokens=16, size=size)
    got = patched.self_attention(n, size, FIRST)
    torch.testing.assert_close(got, attn(n))
    assert not torch.allclose(got, before)
    assert torch.equal(model.self_attention(n, size), before)  # the model that came is as it was


@torch.no_grad()
@pytest.mark.parametrize("by_layer", [False, True])
def test_steps_and_layers_draw_as_those_of_apply_mame(
    node: Any, by_layer: bool, tmp_path: Path
) -> None:
    unet = tiny_unet()
    blocks = {
        ("input", 1 + 2 * level): down.attentions[0].transformer_blocks[0]
        for level, down in enumerate(unet.down_blocks)
    }
    ups = [one.transformer_blocks[0] for up in unet.up_blocks for one in up.attentions]
    blocks |= {("output", i): block for i, block in enumerate(ups)}
    blocks["middle", 0] = unet.mid_block.attentions[0].transformer_blocks[0]
    file, settings = tmp_path / "settings.json", {"keep": 0.25, "min_tokens": 64}
    if by_layer:
        rules: Any = {"up_blocks": {"keep": 0.5}, "down_blocks.1": False}
        rules |= {"up_blocks.1.attentions.1": {"tau": 0.5}}
        file.write_text(json.dumps({**settings, "layers": rules}), encoding="utf-8")
    path = str(file) if by_layer else ""
    patched = {
        where: applied(
            node, Model(UNetModel(copy.deepcopy(blocks), where)),
            keep=0.25, min_tokens=64, settings=path,
        )
        for where in blocks
    }  # fmt: skip
    apply_mame(unet, **MaMeConfig.from_file(file).given if by_layer else settings)
    seen: dict[Any, Any] = {}

    def note(where: Any) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Tensor) -> None:
            seen[where] = args[0] if args else kwargs["hidden_states"], output

        return hook

    for where, one in blocks.items():
        one.attn1.register_forward_hook(note(where), with_kwargs=True)
    latent, text = torch.randn(1, 4, LATENT, LATENT), torch.randn(1, 4, TEXT_DIM)
    for timestep in (900, 500):
        unet(latent, timestep, text)
        for where, model in patched.items():
            n, expected = seen[where]
            side = math.isqrt(n.shape[1])
            got = model.self_attention(n, (side, side), timestep / 1000)
            torch.testing.assert_close(got, expected, msg=str(where))
    n, expected = seen["input", 1]
    assert not torch.allclose(patched["input", 1].self_attention(n, (16, 16), 0.9), expected)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[1, 0], [0, 1]], ids=str)
def test_a_guided_pair_merges_by_the_guided_tokens(
    node: Any, model: Model, chunks: list[int]
) -> None:
    patched = applied(node, model, keep=0.25)
    apart = patched.self_attention(tokens(), (H, W))  # nothing says which is which
    options = patched.model_options["transformer_options"]
    options["cond_or_uncond"] = chunks
    pair = patched.self_attention(tokens(), (H, W))
    guided = chunks.index(0)
    torch.testing.assert_close(pair[guided], apart[guided])
    assert not torch.allclose(pair[1 - guided], apart[1 - guided])
    options["cond_or_uncond"] = [0, 0]  # two prompts
    assert torch.equal(patched.self_attention(tokens(), (H, W)), apart)


@torch.no_grad()
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_patches_that_merge_queries_may_come_before_or_after(
    node: Any, model: Model, first: str
) -> None:
    """Next to "Patch model (ToMe)", with a third fewer queries, keys merge and tokens don't."""
    plain = model.self_attention(tokens(), (H, W))
    error = {}
    for name, values in (("keep", {"keep": 0.75}), ("tau", TAU)):
        patched = applied(node, model, **values) if first == "ours" else model
        patched = patched.clone()
        patched.model_options["transformer_options"] |= patching(
            lambda q, k, v, extra: (q[:, :64], k, v),
            lambda n, extra: torch.cat([n, n[:, :32]], 1),
        )
        patched = applied(node, patched, **values) if first == "theirs" else patched
        got = patched.self_attention(tokens(), (H, W))
        assert got.shape == plain.shape
        error[name] = float((got[:, :64] - plain[:, :64]).norm() / plain[:, :64].norm())
    assert error["tau"] < 1e-6 < error["keep"] < 0.1


@torch.no_grad()
def test_applied_twice_is_the_last_one(node: Any, model: Model) -> None:
    for before, after in ((TAU, KEEP), (KEEP, TAU)):
        twice = applied(node, applied(node, model, **before), **after)
        once = applied(node, model, **after)
        assert torch.equal(
            twice.self_attention(tokens(), (H, W)), once.self_attention(tokens(), (H, W))
        )


@torch.no_grad()
@pytest.mark.parametrize("values", [KEEP, TAU], ids=str)
def test_threads_share_a_node(node: Any, model: Model, values: dict[str, Any]) -> None:
    patched = applied(node, model, **values)
    sizes = [(8, 12), (16, 16), (4, 6), (12, 20)]
    expected = [patched.self_attention(tokens(h * w, i), (h, w)) for i, (h, w) in enumerate(sizes)]

    def same(i: int) -> bool:
        h, w = sizes[i]
        runs = (patched.self_attention(tokens(h * w, i), (h, w)) for _ in range(10))
        return all(torch.equal(run, expected[i]) for run in runs)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, range(4)))


@torch.no_grad()
def test_start_and_end_percent(node: Any, model: Model) -> None:
    patched = applied(node, model, start_percent=0.2, end_percent=0.6)
    plain = model.self_attention(tokens(), (H, W))
    merges = [
        not torch.equal(patched.self_attention(tokens(), (H, W), 1 - share), plain)
        for share in (0.1, 0.4, 0.8)
    ]
    assert merges == [False, True, False]


def replacing(*name: Any) -> dict[str, Any]:
    """Options with another node's attention of a block; PAG's returns the values as the output."""
    return {"patches_replace": {"attn1": {name: lambda q, k, v, extra: v}}}


def patching(before: Any, after: Any = lambda n, extra: n) -> dict[str, Any]:
    """Options with another node's patches before and after the attention."""
    return {"patches": {"attn1_patch": [before], "attn1_output_patch": [after]}}


LEFT_ALONE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"min_tokens": 97}, {}, "96 tokens are fewer than min_tokens=97"),
    ({"min_tokens": 0}, {}, "96 tokens are fewer than min_tokens=1024"),  # a CPU's
    ({"start_percent": 0.8}, {}, "no step was between start_percent and end_percent"),
    # whole keys, by the name of a layer and by that of its block
    ({}, replacing("input", 1, 0), REPLACED),
    (KEEP, replacing("input", 1), REPLACED),
    (TAU, replacing("input", 1, 0), REPLACED),
    (TAU, patching(lambda q, k, v, extra: (q[:, :64], k, v)), CUT),
    # as HyperTile does: queries of four tiles as four times the batch, keys whole
    (
        KEEP,
        patching(
            lambda q, k, v, extra: (q.reshape(8, 24, 16), k, v),
            lambda n, extra: n.reshape(2, 96, 16),
        ),
        CUT,
    ),
    (
        {},
        patching(lambda q, k, v, extra: (q, torch.cat([k, k], 1), torch.cat([v, v], 1))),
        "attention over 192 tokens is not the image's 8 x 12",
    ),
]


@torch.no_grad()
@pytest.mark.parametrize(("changes", "options", "reason"), LEFT_ALONE)
def test_a_run_in_which_nothing_merged_is_as_before_and_warns_why(
    node: Any,
    model: Model,
    caplog: Any,
    changes: dict[str, Any],
    options: dict[str, Any],
    reason: str,
) -> None:
    outputs = []
    for one in (model, applied(node, model, **changes)):
        one.model_options["transformer_options"] |= options
        outputs.append(one.sample(lambda run: run.self_attention(tokens(), (H, W))))
    assert torch.equal(*outputs)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", f"MaMe merged nothing: {reason}")
    ]


@torch.no_grad()
def test_attention_that_never_reaches_the_node_is_a_warning(
    node: Any, model: Model, block: Any, caplog: Any
) -> None:
    applied(node, model).sample(lambda run: None)
    plain = model.self_attention(tokens(), (H, W))
    bypassed = UNetModel(block)  # as another node does that asks for no override
    bypassed.attend = lambda q, k, v, _: attention_pytorch(q, k, v, 2)  # type: ignore[method-assign]
    run = applied(node, Model(bypassed))
    assert torch.equal(run.sample(lambda run: run.self_attention(tokens(), (H, W))), plain)
    assert caplog.messages == [
        "MaMe merged nothing: the engine never handed its attention to the node; update ComfyUI",
        "MaMe merged nothing: another node has replaced the engine's attention; remove one of the"
        " two nodes",
    ]


@torch.no_grad()
def test_cross_attention_passes_through_as_it_is(node: Any, model: Model) -> None:
    patched, seen = applied(node, model), []

    def other(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        seen.append([t.shape[1] for t in args[:3]])
        result: Tensor = function(*args, **kwargs)
        return result

    patched.model_options["transformer_options"]["optimized_attention_override"] = other
    patched.self_attention(tokens(), (H, W))
    given = tokens(), tokens(7), tokens(7)
    cross = patched.apply_model(
        torch.zeros(2, 4, H, W),
        0.5,
        lambda options: optimized_attention(*given, 2, transformer_options=options),
    )
    assert torch.equal(cross, attention_pytorch(*given, 2))
    assert seen == [[96, 24, 24], [96, 7, 7]]


@torch.no_grad()
def test_a_compiled_model_is_one_graph_for_every_step(node: Any, block: Any, caplog: Any) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch._dynamo.reset()
    model = Model(UNetModel(block))
    compiled = Model(torch.compile(model.network, backend=counter, fullgraph=True))

    def steps(run: Model) -> list[Tensor]:
        return [run.self_attention(tokens(), (H, W), sigma) for sigma in (0.9, 0.6, 0.5, 0.1)]

    expected = applied(node, model).sample(steps)
    caplog.set_level("INFO", logger="mame-sd")
    patched = applied(node, compiled)
    for _ in range(2):
        torch.testing.assert_close(patched.sample(steps), expected)
    assert counter.frame_count == 1
    ours = [record.getMessage() for record in caplog.records if record.name == "mame-sd"]
    assert ours == ["MaMe merged 96 -> 24 keys at 8 x 12"] * 2


FLUX = network("Flux", patch_size=2)
OLDER = network("HunyuanVideo", double_blocks=[SimpleNamespace(flipped_img_txt=True)])
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (FLUX, {"keep": 0.0}, "keep: expected a share above 0"),
    (FLUX, {"mode": "tau", "tau": 1.5}, "tau: expected"),
    (FLUX, {"start_percent": 0.8, "end_percent": 0.2}, "got 0.8 and 0.2"),
    (FLUX, {"end_percent": 1.5}, "got 0.0 and 1.5"),
    (FLUX, {"mode": "tau"}, "tau: expected mode keep for Flux, in which only keys"),
    (OLDER, {}, "expected HunyuanVideo with its text before its image, g"),
]


@pytest.mark.parametrize(("model", "changes", "message"), REFUSED)
def test_what_cannot_be_is_refused_when_applied(
    node: Any, model: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        applied(node, Model(model), **changes)


def test_a_part_of_the_steps_is_refused_beside_a_compiled_model(node: Any, model: Model) -> None:
    compiled = {"wrappers": {"apply_model": {"torch.compile": [None]}}}
    for changes in ({"start_percent": 0.5}, {"end_percent": 0.5}):
        patched = applied(node, model, **changes)
        patched.model_options["transformer_options"] |= compiled
        with pytest.raises(ValueError, match="expected 0 and 1 with TorchCompileModel"):
            patched.sample(lambda run: run.self_attention(tokens(), (H, W)))


def test_a_refusal_names_the_model_as_people_know_it(node: Any) -> None:
    """The name is that of its own class, not its base's, since Wan's own merges."""
    refused = COMFYUI | {"LensTransformer2DModel": ("Lens", "the node does not know yet where")}
    base = type("WanModel", (nn.Module,), {"patch_size": (1, 2, 2)})
    for kind, (name, why) in refused.items():
        model = type(kind, (base,) if "Wan" in kind else (nn.Module,), {})()
        message = f"^MaMe token merging: {name} does not merge, since {why}.*; remove the node"
        with pytest.raises(ValueError, match=message):
            applied(node, Model(model))


def test_inputs_are_what_comfyui_reads(package: Any, node: Any) -> None:
    kind = type(node)
    inputs = kind.INPUT_TYPES()["required"]
    assert inputs["model"][0] == "MODEL"
    assert inputs["keep"][1]["default"] == MaMeConfig().keep
    for name in ("keep", "tau", "min_tokens", "start_percent", "end_percent"):
        options = inputs[name][1]
        assert options["min"] <= options["default"] <= options["max"]
        if name in ("keep", "tau"):  # the ends of each range are values that it takes
            assert MaMeConfig(**{name: options["min"]}) != MaMeConfig(**{name: options["max"]})
    assert callable(getattr(kind, kind.FUNCTION))
    assert set(package.NODE_DISPLAY_NAME_MAPPINGS) == set(package.NODE_CLASS_MAPPINGS)
