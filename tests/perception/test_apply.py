"""apply_encoder's settings, what stays in batches, restoring, sizes, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mame_sd import MaMeConfig, plan_merge
from mame_sd.perception.apply import apply_encoder, encoder_restored, has_encoder_hooks, remove_encoder
from mame_sd.perception.blocks import weighted
from mame_sd.perception.families import Encoder, find_encoder, is_encoder, register_encoder
from mame_sd.perception.settings import EVERY, LEFT, chosen_blocks, configs_of
from tests.builders.perception import DEPTH, PATCH, PATCHES, ROWS, SIDE, TIMM, WIDTH, Row
from tests.builders.tiny import seeded, tiny_unet
from tests.perception.oracle import blocks_of, merged_oracle

VIT = next(row for row in ROWS if row.name == "ViTForImageClassification")
MEAN = next(row for row in ROWS if row.name == "SiglipForImageClassification")
POOLED = next(row for row in ROWS if row.name == "SiglipVisionModel")


def tokens(handle: Any) -> list[float]:
    return [block.tokens_kept for block in handle.report().blocks]


@pytest.mark.parametrize(
    ("blocks", "chosen"),
    [(None, (0, 1, 2, 3)), (2, (0, 1)), ((3, 1), (1, 3)), ((-1,), (3,)), (range(1, 3), (1, 2))],
)
def test_blocks(blocks: Any, chosen: tuple[int, ...]) -> None:
    assert tuple(apply_encoder(VIT.build(), preset="plain", blocks=blocks).configs) == chosen
    if blocks is not None:
        assert tuple(apply_encoder(VIT.build(), keep=0.5, blocks=blocks).configs) == chosen


@pytest.mark.parametrize("blocks", [0, 5, (), (4,), (-5,), (1, 1), (1, -3), "two", (0.5,), True])
def test_blocks_that_are_not_there(blocks: Any) -> None:
    with pytest.raises(ValueError, match="blocks: expected"):
        apply_encoder(VIT.build(), blocks=blocks)


def test_by_default_every_second_block_keeps_an_equal_share_and_the_last_leaves_a_fifth() -> None:
    for given in ({}, {"preset": "default"}, {"config": MaMeConfig()}, {"tau": None, "keep": None}):
        handle = apply_encoder(VIT.build(), **given)
        assert {block: config.keep for block, config in handle.configs.items()} == {0: 0.5, 2: 0.5}
        assert handle.prop_attn
        config = handle.config
        assert (config.tau, config.partition, bool(config.tiles)) == (None, "grid", False)
        assert (config.weights, config.min_tokens) == ("best", 2)
    assert apply_encoder(VIT.build(), blocks=1).config.keep == 0.5, "no less in one block"
    handle = apply_encoder(VIT.build(), blocks=range(DEPTH))
    assert [config.keep for config in handle.configs.values()] == pytest.approx([0.2**0.25] * DEPTH)
    for given in ({"keep": 0.7}, {"tau": 0.7}, {"config": MaMeConfig(keep=0.7)}):
        assert tuple(apply_encoder(VIT.build(), **given).configs) == (0, 2)
    assert tuple(apply_encoder(VIT.build(), preset="plain").configs) == tuple(range(DEPTH)), "the paper's: all"
    config = apply_encoder(VIT.build(), MaMeConfig(keep=0.7)).config
    assert (config.keep, config.partition, bool(config.tiles), config.weights) == (0.7, "grid", False, "best")


@pytest.mark.parametrize(("depth", "count"), [(12, 6), (24, 12), (27, 14)])
def test_of_so_many_blocks_every_second_merges_and_the_last_leaves_a_fifth(depth: int, count: int) -> None:
    blocks = chosen_blocks(None, depth, EVERY)
    assert blocks == tuple(range(0, depth, 2))
    keeps = [config.keep for config in configs_of(None, {}, blocks).values()]
    assert len(keeps) == count
    assert math.prod(keeps) == pytest.approx(LEFT)
    assert len({*keeps}) == 1


def test_applied_and_set_a_share_means_the_same() -> None:
    applied, handle = apply_encoder(VIT.build(), keep=0.8), apply_encoder(VIT.build())
    before = handle.configs
    handle.set(keep=0.8)
    assert handle.configs == applied.configs
    handle.set(MaMeConfig())
    assert handle.configs == before


def test_none_leaves_what_the_config_says() -> None:
    config = MaMeConfig(preset="plain", keep=0.8)
    handle = apply_encoder(VIT.build(), config, preset=None, keep=None)
    assert handle.configs == apply_encoder(VIT.build(), config).configs
    assert (len(handle.configs), handle.config.keep, handle.prop_attn) == (DEPTH, 0.8, False)


@pytest.mark.parametrize("given", [{"preset": "plain"}, {"config": MaMeConfig(preset="plain")}, {"variant": "paper"}])
def test_the_paper_s_form_is_by_tau_and_counts_no_sizes(given: dict[str, Any]) -> None:
    handle = apply_encoder(VIT.build(), **given)
    assert (handle.config.tau, handle.config.keep, handle.prop_attn) == (0.8, None, False)
    assert apply_encoder(VIT.build(), **given, prop_attn=True).prop_attn


@torch.no_grad()
def test_sizes_count_unless_they_can_t() -> None:
    model, inputs = VIT.build(), VIT.batch()
    handle = apply_encoder(model, keep=0.5)
    assert (handle.prop_attn, handle.report().prop_attn) == (True, True)
    assert "attention counts how many" in str(handle.report())
    counted = VIT.call(model, inputs)["logits"]
    other = apply_encoder(model, keep=0.5, prop_attn=False)
    assert "attention does not count how many" in str(other.report())
    assert not torch.equal(VIT.call(model, inputs)["logits"], counted)
    handle = apply_encoder(model, keep=0.5)
    model.vit.config._attn_implementation = "flash_attention_2"
    assert (handle.prop_attn, handle.report().prop_attn) == (False, False), "as the model is set now"


@torch.no_grad()
def test_a_handle_s_settings_are_those_of_another_model_too() -> None:
    first = apply_encoder(VIT.build())
    again = apply_encoder(VIT.build(), MaMeConfig.from_dict(first.config.to_dict(given_only=True)))
    assert (again.configs, again.prop_attn) == (first.configs, True)
    assert apply_encoder(VIT.build(), tau=None, keep=None).configs == first.configs


def test_sizes_go_with_the_forward() -> None:
    model = VIT.build()
    handle = apply_encoder(model, keep=0.5)
    VIT.call(model, VIT.batch())
    assert handle._shared.sizes is None


def test_the_preset_is_chosen_when_merging_is_applied() -> None:
    handle = apply_encoder(VIT.build())
    before = handle.configs
    for change in ({"preset": "plain"}, {"config": MaMeConfig(preset="plain")}):
        with pytest.raises(ValueError, match="preset: expected the one that merging was applied with"):
            handle.set(**change)
    assert handle.configs == before
    with pytest.raises(ValueError, match="preset: expected"):
        apply_encoder(VIT.build(), preset="plian")


def test_one_number_for_each_block() -> None:
    handle = apply_encoder(VIT.build(), keep=(0.5, 0.9), blocks=(0, 3))
    assert [config.keep for config in handle.configs.values()] == [0.5, 0.9]
    handle.set(tau=[0.5, 0.6])
    assert [config.tau for config in handle.configs.values()] == [0.5, 0.6]
    handle.set(MaMeConfig(metric="dot"), tau=0.1)
    assert [(config.tau, config.metric) for config in handle.configs.values()] == [(0.1, "dot")] * 2
    handle.set(MaMeConfig(keep=1.0))
    assert {config.keep for config in handle.configs.values()} == {1.0}
    with pytest.raises(ValueError, match="tau: expected one number, or one for each of 2 blocks, got 3"):
        handle.set(tau=(0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "pick"}, "weights: expected .average. or .best. for a vision transformer, got .pick."),
        ({"merge": "kv"}, "merge: expected none for a vision transformer, got 'kv': an encoder's tokens merge once"),
        ({"size": (4, 4)}, "size: expected none"),
        ({"redraw": True}, "redraw: expected none"),
        ({"pairs": True}, "pairs: expected none"),
        ({"keep": 0.5, "mlp": 0.5}, "mlp: expected none"),
        ({"tau": 2}, "tau: expected a finite number from -1 to 1"),
        ({"taw": 0.5}, "did you mean 'tau'"),
    ],
)
def test_settings_that_mean_nothing_here(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_encoder(VIT.build(), **fields)


@torch.no_grad()
def test_few_tokens_are_left_alone() -> None:
    model = VIT.build()
    handle = apply_encoder(model, keep=0.5, blocks=DEPTH, min_tokens=18, restore=True)
    assert model.vit(**VIT.batch()).last_hidden_state.shape[1] == PATCHES + 1
    assert tokens(handle) == [19, 10, 10, 10]
    assert [block.note for block in handle.report().blocks] == ["", "", *["fewer than min_tokens=18"] * 2]
    register_encoder(MINE)
    model = MyViT(blocks=5)
    handle = apply_encoder(model, keep=0.5, blocks=5)
    assert model(torch.randn(2, 1 + 4, 8)).shape[1] == 1 + 1
    assert not handle.prop_attn, "its description does not say that attention adds a mask"
    assert tokens(handle) == [3, 2, 2, 2, 2]


@torch.no_grad()
def test_settings_change_and_go() -> None:
    model, inputs = VIT.build(), VIT.batch()
    before = VIT.call(model, inputs)["logits"]
    first = apply_encoder(model, keep=0.5)
    with encoder_restored(model):
        second = apply_encoder(model, keep=0.75, blocks=1)
        assert (first.installed, second.installed) == (False, True)
        with pytest.raises(RuntimeError, match="removed or replaced"):
            first.set(tau=0.5)
    assert (first.installed, second.installed) == (True, False)
    first.set(keep=1.0)
    VIT.call(model, inputs)
    assert tokens(first) == [PATCHES + 1] * DEPTH
    second.remove()
    assert first.installed
    first.reset()
    assert first.report().calls == 0
    remove_encoder(model)
    remove_encoder(model)
    assert torch.equal(VIT.call(model, inputs)["logits"], before)


@pytest.mark.parametrize("row", [VIT, MEAN], ids=lambda row: row.name)
@torch.no_grad()
def test_with_keep_a_sample_does_not_see_its_neighbours(row: Row) -> None:
    model, inputs = row.build(), row.batch(3)
    handle = apply_encoder(model, keep=0.6, prop_attn=True)
    handle.capture()
    both = row.call(model, inputs)
    owners = handle.owners()
    for sample in range(3):
        alone = row.call(model, {name: value[sample : sample + 1] for name, value in inputs.items()})
        torch.testing.assert_close(alone["logits"][0], both["logits"][sample])
        assert torch.equal(handle.owners()[0], owners[sample])


@torch.no_grad()
def test_with_tau_a_token_stays_where_any_sample_keeps_it() -> None:
    model, inputs = VIT.build(), VIT.batch(3)
    handle = apply_encoder(model, tau=0.35, blocks=1)
    handle.capture()
    stays = []
    for sample in range(3):
        VIT.call(model, {name: value[sample : sample + 1] for name, value in inputs.items()})
        stays.append(handle.plans()[0].preserved[0])
    VIT.call(model, inputs)
    plan = handle.plans()[0]
    assert torch.equal(plan.preserved, torch.stack(stays).any(0).expand(3, -1))
    assert 0 < plan.preserved[0].sum() < plan.preserved.shape[1]


@pytest.mark.parametrize("fields", [{"keep": 0.6}, {"tau": 0.3}], ids=str)
@torch.no_grad()
def test_restoring_puts_every_token_at_its_place(fields: dict[str, float]) -> None:
    model, inputs = VIT.build(), VIT.batch()
    handle = apply_encoder(model, blocks=(0, 1, 3), **fields)
    with pytest.raises(RuntimeError, match=r"call handle.capture\(\) before"):
        handle.owners()
    handle.capture()
    kept = model.vit(**inputs).last_hidden_state
    whole = handle.restore(kept)
    assert whole.shape == (2, PATCHES + 1, WIDTH)
    constant = torch.ones_like(kept) * 0.7
    torch.testing.assert_close(handle.restore(constant), torch.full_like(whole, 0.7))
    owners = handle.owners()
    for sample in range(2):
        holders = owners[sample].unique()
        assert len(holders) == kept.shape[1]
        assert torch.equal(owners[sample][holders], holders)  # a token that is kept holds itself
        rows = {tuple(row.tolist()) for row in kept[sample]}
        assert {tuple(row.tolist()) for row in whole[sample][holders]} == rows
    assert torch.equal(whole[:, 0], kept[:, 0])
    assert len(handle.owners(0)[0].unique()) == handle.plans()[0].tokens_kept
    with pytest.raises(ValueError, match="restore: expected a tensor of shape"):
        handle.restore(whole)
    handle.capture(False)
    with pytest.raises(RuntimeError, match="none were kept"):
        handle.restore(kept)


@torch.no_grad()
def test_a_restored_output_weighs_means_by_what_tokens_stand_for() -> None:
    model, inputs = MEAN.build(), MEAN.batch()
    apply_encoder(model, keep=0.5, blocks=(0, 2), weights="best")
    merged = apply_encoder(model, keep=0.5, blocks=(0, 2), weights="best")
    merged.capture()
    tokens = model.vision_model(**inputs).last_hidden_state
    sizes = torch.stack([torch.bincount(row, minlength=PATCHES) for row in merged.owners()])
    order = torch.stack([sizes[b][sizes[b] > 0] for b in range(2)])
    restored = apply_encoder(model, keep=0.5, blocks=(0, 2), weights="best", restore=True)
    whole = model.vision_model(**inputs).last_hidden_state
    assert whole.shape[1] == PATCHES
    assert order.sum(1).tolist() == [PATCHES] * 2
    torch.testing.assert_close(model(**inputs).logits, model.classifier(whole.mean(1)))
    for b in range(2):  # each kept token's copies: as many rows of the restored output as it stands for
        rows, counts = whole[b].unique(dim=0, return_counts=True)
        assert sorted(counts.tolist()) == sorted(order[b].tolist())
        assert {tuple(row.tolist()) for row in rows} == {tuple(row.tolist()) for row in tokens[b]}
    assert restored.report().blocks[0].merging == merged.report().blocks[0].merging, "rows are taken without a product"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["best", "average"])
def test_means_of_tokens_that_stand_for_many_count_these(weights: Any, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 33, 8, generator=g).to(dtype).requires_grad_()
    sizes = torch.randint(1, 40, (2, 33), generator=g).float()
    sizes[:, 0] = 1
    plan = plan_merge(x.detach(), MaMeConfig(keep=0.6, weights=weights, preset="plain"), special=1)
    got, summed = weighted(plan, x, sizes)
    shares = torch.zeros(2, plan.tokens_kept, 33, dtype=torch.float64)  # of each token that goes to each kept one
    for column in range(33):
        one = torch.zeros(2, 33, 1, dtype=torch.float64)
        one[:, column] = 1
        shares[:, :, column] = plan.summed(one.squeeze(-1))
    total = (shares * sizes.double().unsqueeze(1)).sum(2)
    torch.testing.assert_close(summed.double(), total, rtol=1e-5, atol=1e-5)
    wanted = shares * sizes.double().unsqueeze(1) @ x.double() / total.unsqueeze(-1)
    rough = {torch.bfloat16: 0.03, torch.float16: 0.004}.get(dtype, 1e-5)
    assert got.dtype == dtype
    alone = ((shares > 0).sum(2) == 1) if weights == "best" else torch.zeros_like(total, dtype=torch.bool)
    assert torch.equal(got[alone], torch.einsum("bkl,blc->bkc", shares.to(dtype), x)[alone]), "to the bit"
    assert weights == "average" or alone.sum() > 10
    torch.testing.assert_close(got.double(), wanted, rtol=rough, atol=rough)
    gradients = (torch.autograd.grad(one.double().square().sum(), x)[0].double() for one in (got, wanted))
    torch.testing.assert_close(*gradients, rtol=2 * rough, atol=2 * rough)


@pytest.mark.parametrize("weights", ["best", "average"])
@torch.no_grad()
def test_a_large_value_times_its_size_stays_in_range(weights: Any) -> None:
    x = torch.full((1, 8, 4), 2000.0, dtype=torch.float16)
    plan = plan_merge(x, MaMeConfig(keep=0.5, weights=weights, preset="plain"))
    assert torch.equal(weighted(plan, x, torch.full((1, 8), 60.0))[0], x[:, :4])


def twins(row: Row, model: nn.Module) -> dict[str, Any]:
    """Images whose patches come in pairs of equals, to a model that does not see where they are."""
    encoder = find_encoder(model)[0]
    for name, part in encoder.named_parameters():
        if "position_embedding" in name:
            part.data.zero_()
    inputs = row.batch()
    values = inputs["pixel_values"].unflatten(-1, (SIDE // 8, 2, 4))
    return {**inputs, "pixel_values": values[:, :, :, :, :1].expand_as(values).flatten(-3)}


@pytest.mark.parametrize("row", [VIT, MEAN, POOLED], ids=lambda row: row.name)
@torch.no_grad()
def test_counting_sizes_makes_merging_of_equals_exact(row: Row) -> None:
    model = row.build()
    inputs = twins(row, model)
    key = "pooler_output" if row is POOLED else "logits"
    want = row.call(model, inputs)[key]
    # half of the tokens: the class token takes no part, and a plain mean of what every pair became is the pairs' mean
    pairs: dict[str, Any] = {"partition": "alternating", "prop_attn": True, "restore": True}
    handle = apply_encoder(model, keep=0.5, blocks=(0,), **pairs)
    torch.testing.assert_close(row.call(model, inputs)[key], want, rtol=1e-4, atol=1e-4)
    assert handle.report().blocks[0].share < 0.6
    handle = apply_encoder(model, tau=0.9999, blocks=(0, 2), **pairs)
    torch.testing.assert_close(row.call(model, inputs)[key], want, rtol=1e-4, atol=1e-4)
    if row is VIT:  # without counting, the class token weighs twice as much beside pairs
        apply_encoder(model, keep=0.5, blocks=(0,), partition="alternating", prop_attn=False)
        assert not torch.allclose(row.call(model, inputs)[key], want, rtol=1e-4, atol=1e-4)


def test_sizes_need_attention_that_adds_a_mask() -> None:
    model = VIT.build()
    apply_encoder(model, keep=0.5, prop_attn=True)
    model.config._attn_implementation = model.vit.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="prop_attn: expected attention implementation 'eager' or 'sdpa', got 'flash"):
        VIT.call(model, VIT.batch())


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@torch.no_grad()
def test_sizes_in_both_attention_implementations(kind: str) -> None:
    model, inputs = VIT.build(), VIT.batch()
    model.set_attn_implementation(kind)
    apply_encoder(model, keep=0.5, prop_attn=True)
    got = VIT.call(model, inputs)["logits"]
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(got, VIT.call(model, inputs)["logits"])


@torch.no_grad()
def test_a_grid_is_one_in_the_first_block_alone() -> None:
    model, wide = VIT.build(), torch.randn(1, 3, SIDE, 2 * SIDE)
    handle = apply_encoder(model, keep=0.25, blocks=(0, 1), partition="grid", stride=(2, 2))
    handle.capture()
    model(wide, interpolate_pos_encoding=True)
    first, second = handle.report().blocks[:2]
    assert (first.tokens_kept, first.note) == (1 + 18, "")
    assert handle.plans()[0].positions.dst.tolist()[:8] == [0, 2, 4, 6, 8, 10, 24, 26]  # every other one of rows of 12
    assert second.tokens_kept == 1 + 9
    assert not second.note, "as documented"
    handle = apply_encoder(model, keep=0.5, blocks=(0, 1), partition="random-grid")
    VIT.call(model, VIT.batch())
    first, second = handle.report().blocks[:2]
    assert not first.note
    assert "no grid: partition 'alternating'" in second.note
    row = next(row for row in ROWS if row.name == "ViTMAEModel")
    for given in ({"partition": "grid", "tiles": 2}, {}):
        handle = apply_encoder(row.build(), keep=0.5, blocks=2, **given)
        row.call(handle.root, row.batch())
        first, second = handle.report().blocks[:2]
        assert "height and width unknown" in first.note
        assert bool(second.note) == bool(given)


@torch.no_grad()
def test_no_grid_where_whole_blocks_are_computed_again() -> None:
    model = VIT.build()
    handle = apply_encoder(model, keep=0.6)
    handle.encoder.grad_checkpointing = True  # as timm's says it
    for training in (True, False):
        handle.reset()
        VIT.call(model.train(training), VIT.batch())
        assert bool(handle.report().blocks[0].note) == training


@torch.no_grad()
def test_by_default_a_grid_of_any_sides_is_the_oracle_s() -> None:
    model, tall = VIT.build().double(), torch.randn(2, 3, 7 * PATCH, 5 * PATCH).double()
    want = merged_oracle(model, VIT, apply_encoder(model).configs, True, (7, 5))
    handle = apply_encoder(model)
    handle.capture()
    got = model(tall, interpolate_pos_encoding=True).logits
    assert handle.plans()[0].positions.dst.tolist() == [10 * y + x for y in range(4) for x in (0, 2, 4)]
    remove_encoder(model)
    torch.testing.assert_close(got, want(tall, interpolate_pos_encoding=True).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_by_its_own_images_grid(reentrant: bool) -> None:
    grads = []
    for checkpoint in (False, True):
        model = VIT.build().train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        apply_encoder(model, keep=0.6)
        images = torch.randn(2, 3, 9 * PATCH, 4 * PATCH, generator=torch.Generator().manual_seed(0))
        both = [model(one, interpolate_pos_encoding=True).logits for one in (images, images.mT.contiguous())]
        sum(logits.square().sum() for logits in both).backward()
        grads.append([part.grad for part in model.parameters() if part.grad is not None])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, one)


@torch.no_grad()
def test_hidden_states_are_those_that_blocks_give() -> None:
    model, inputs = VIT.build(), VIT.batch()
    apply_encoder(model, keep=0.5, blocks=(1,))
    states = model(**inputs, output_hidden_states=True).hidden_states
    assert [state.shape[1] for state in states] == [37, 37, 19, 19, 19]


@torch.no_grad()
def test_tau_compiles_around_merging() -> None:
    torch._dynamo.reset()
    model = VIT.build()
    handle = apply_encoder(model, tau=0.4, blocks=2, prop_attn=True)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    counts = []
    for seed in range(8):
        inputs = VIT.batch(seed=seed)
        handle.reset()
        torch.testing.assert_close(VIT.call(compiled, inputs), VIT.call(model, inputs))
        counts.append((len(graphs), *tokens(handle)))
    assert len({kept for _, kept, *_ in counts}) > 3
    assert counts[3][0] == counts[-1][0]  # other numbers of tokens compile nothing more


@torch.no_grad()
def test_tau_in_one_block_compiles_to_one_graph_where_shapes_may_depend_on_data() -> None:
    torch._dynamo.reset()
    model = VIT.build()
    apply_encoder(model, tau=0.2, blocks=(1,))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for seed in range(2):
            inputs = VIT.batch(seed=seed)
            torch.testing.assert_close(VIT.call(compiled, inputs), VIT.call(model, inputs))


@pytest.mark.parametrize("row", TIMM[:1])
def test_timm_checkpoints_and_gives_features_directly(row: Row) -> None:
    model, image = row.build().double(), row.batch()["pixel_values"].double()
    handle = apply_encoder(model, keep=0.5, blocks=(0, 2))
    assert model.forward_features(image).shape[1] == 1 + 9
    grads = []
    for checkpoint in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(checkpoint)
        model.train()(image).square().sum().backward()
        grads.append([part.grad.clone() for part in model.parameters() if part.grad is not None])
    torch.testing.assert_close(grads[1], grads[0])
    assert math.isclose(handle.report().blocks[0].tokens_kept, 19)
    apply_encoder(model, keep=0.5, prop_attn=True)
    with pytest.raises(ValueError, match=r"prop_attn: expected no checkpointing around blocks \(timm"):
        model(image)


def refused(name: str, **overrides: Any) -> nn.Module:
    kind = getattr(transformers, name)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"image_size": SIDE, "patch_size": 4}
    return seeded(kind, 0, kind.config_class(**(overrides if name.startswith("Swin") else {**sizes, **overrides})))


SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 3}


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("SwinForImageClassification", SWIN, "SwinModel: its attention works in windows"),
        ("BeitForImageClassification", {}, "BeitModel: its attention adds a bias for each pair"),
        ("DINOv3ViTModel", {}, "DINOv3ViTModel: positions turn its queries and keys inside attention"),
        ("ViTMAEForPreTraining", {}, "ViTMAEForPreTraining: its decoder needs every token; apply to its encoder"),
        ("ViTForMaskedImageModeling", {"encoder_stride": 4}, "its output puts every token at its place"),
        ("Dinov2Backbone", {}, "take the model in its place"),
    ],
)
def test_models_whose_tokens_must_stay_are_refused_with_a_reason(
    name: str, overrides: dict[str, Any], message: str
) -> None:
    model = refused(name, **overrides)
    assert is_encoder(model)
    with pytest.raises(ValueError, match=message):
        apply_encoder(model, tau=0.8)
    assert not has_encoder_hooks(model)


def test_what_is_no_vision_transformer() -> None:
    assert not is_encoder(tiny_unet())
    assert not is_encoder("facebook/deit-base-patch16-224")
    with pytest.raises(
        ValueError, match=r"expected one vision transformer \(.*ViTModel.*\), got Linear; give the model"
    ):
        apply_encoder(nn.Linear(2, 2))
    both = nn.ModuleList([VIT.build(), VIT.build()])
    with pytest.raises(ValueError, match=r"got 0.vit \(ViTModel\), 1.vit \(ViTModel\)"):
        apply_encoder(both)


def test_blocks_that_another_tool_has_wrapped_are_refused() -> None:
    model = VIT.build()
    block = blocks_of(model, VIT)[1]
    block.forward = block.forward
    with pytest.raises(ValueError, match="expected a ViTLayer with its own forward, found another tool's"):
        apply_encoder(model, keep=0.5)
    assert not has_encoder_hooks(model)


def test_masks_are_refused() -> None:
    model, inputs = VIT.build(), VIT.batch()
    apply_encoder(model, keep=0.5, blocks=1)
    mask = torch.ones(2, PATCHES + 1)
    mask[0, 5] = 0
    with pytest.raises(ValueError, match="expected images without an attention mask"):
        model(**inputs, attention_mask=mask)
    row = next(row for row in ROWS if row.name == "Siglip2ForImageClassification")
    model, inputs = row.build(), row.batch()
    apply_encoder(model, keep=0.5)
    with pytest.raises(ValueError, match="pixel_attention_mask: expected none"):
        row.call(model, {**inputs, "pixel_attention_mask": torch.ones(2, PATCHES)})


class MyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attend, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_a(x))
        return x + self.mlp(self.norm_b(x))


class MyViT(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MyBlock() for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


MINE = Encoder("mine", ("MyViT",), "MyBlock", ("norm_a", "attend"), ("norm_b", "mlp"), special=1)


@torch.no_grad()
def test_a_model_of_one_s_own() -> None:
    model, x = MyViT(), torch.randn(2, 9, 8)
    assert not is_encoder(nn.Sequential(MyBlock()))
    register_encoder(MINE)
    assert is_encoder(model)
    handle = apply_encoder(model, keep=0.5, blocks=2)
    assert model(x).shape == (2, 1 + 2, 8)
    assert "blocks.1" in str(handle.report())
    with pytest.raises(ValueError, match="feature: expected 'x' for a model of kind 'mine'"):
        apply_encoder(model, keep=0.5, feature="k")
    with pytest.raises(
        ValueError, match="prop_attn: expected attention that takes an argument 'attention_mask', which Lin"
    ):
        apply_encoder(model, keep=0.5, prop_attn=True)
    model.blocks[1].bias = nn.Parameter(torch.zeros(8))
    with pytest.raises(
        ValueError, match=r"expected a MyViT with blocks .* got another kind .MyBlock: it also has bias"
    ):
        apply_encoder(model, keep=0.5)


@torch.no_grad()
def test_an_exported_model_merges_and_counts_nothing() -> None:
    register_encoder(MINE)
    model, x = MyViT(), torch.randn(2, 9, 8)
    handle = apply_encoder(model, keep=0.5, blocks=2)
    want, report = model(x), handle.report()
    exported = torch.export.export(model, (x,), strict=False).run_decompositions({})
    torch.testing.assert_close(exported.module()(x), want)
    assert handle.report() == report
