"""The counter of kernels: what it counts, what it does not, and that models take the way of a
graphics card.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.launches import CARD, counted, on_card, pretended
from mame_sd import apply_mame
from mame_sd.core.cards import Work
from tests.builders.tiny import tiny_unet, unet_inputs

HALF = torch.float16


def test_meta_tensors_say_that_they_lie_on_a_card_within_the_block_alone() -> None:
    meta, cpu = torch.empty(2, device="meta"), torch.empty(2)
    with pretended():
        assert meta.is_cuda
        assert meta.device == CARD
        assert torch.empty(3, device=meta.device).device == CARD
        assert cpu.to(CARD).is_cuda
        assert cpu.to("cuda").is_cuda
        assert not cpu.is_cuda
        assert cpu.device.type == "cpu"
    assert not meta.is_cuda
    assert meta.device.type == "meta"


def test_values_that_a_model_reads_are_those_that_are_known() -> None:
    ids, values = torch.empty(3, device="meta"), torch.tensor([1.0, 2.0, 3.0])
    with pretended({id(ids): values}):
        assert ids.cpu() is values


def test_bytes_and_products_of_each_kind() -> None:
    with pretended():
        x, linear = (
            torch.empty(4, 8, device=CARD, dtype=HALF),
            on_card(nn.Linear(8, 16, dtype=HALF, device="meta")),
        )
        assert counted(lambda: linear(x)) == [
            Work("linear", "product", HALF, 2 * (4 * 8 + 8 * 16 + 16 + 4 * 16), 2 * 4 * 8 * 16)
        ]
        assert counted(lambda: x @ x.T) == [
            Work("mm", "product", HALF, 2 * (2 * 32 + 16), 2 * 4 * 8 * 4)
        ]
        conv = on_card(nn.Conv2d(3, 5, 3, device="meta"))
        (work,) = counted(lambda: conv(torch.empty(1, 3, 6, 6, device=CARD)))
        assert (work.kind, work.flops, work.launches) == ("convolution", 2 * 27 * 5 * 16, 2)
        q, k = torch.empty(2, 3, 10, 64, device=CARD), torch.empty(2, 3, 7, 64, device=CARD)
        (work,) = counted(lambda: F.scaled_dot_product_attention(q, k, k))
        assert work == Work(
            "attention",
            "attention",
            torch.float32,
            4 * 6 * 64 * (10 + 7 + 7 + 10),
            4 * 6 * 10 * 7 * 64,
            width=64,
        )
        mask = torch.empty(1, 1, 10, 7, device=CARD)
        (masked,) = counted(lambda: F.scaled_dot_product_attention(q, k, k, mask))
        assert (masked.kind, masked.bytes - work.bytes) == ("masked attention", 4 * 70)
        assert F.scaled_dot_product_attention(q, k, k).shape == q.shape


def test_reads_of_a_few_rows_are_not_those_of_all_and_repeated_entries_count_once() -> None:
    with pretended():
        x, index = torch.empty(1000, 8, device=CARD), torch.zeros(3, dtype=torch.long, device=CARD)
        (work,) = counted(lambda: x.index_select(0, index))
        assert work.bytes == 2 * 3 * 8 * 4 + 3 * 8
        (work,) = counted(lambda: x[:1].expand(50, -1) + 1)
        assert work.bytes == 8 * 4 + 50 * 8 * 4


def test_views_and_buffers_and_what_the_processor_does_launch_nothing() -> None:
    with pretended():
        x = torch.empty(4, 6, device=CARD)

        def nothing() -> None:
            x.view(24).unsqueeze(0).transpose(0, 1).expand(24, 5)
            torch.empty_like(x)
            x.flatten().chunk(2)
            torch.arange(5) + 1  # on the CPU

        assert counted(nothing) == []
        assert [work.name for work in counted(lambda: x.t().contiguous())] == ["clone"]
        assert sum(work.launches for work in counted(lambda: x.argsort(1))) == 6


def test_a_models_layers_merge_as_on_a_card_and_their_kernels_are_counted() -> None:
    unet = tiny_unet()
    inputs = unet_inputs(unet)
    on_card(unet)
    inputs = {name: value.to("meta") for name, value in inputs.items()}
    with pretended():
        plain = counted(lambda: unet(**inputs))
    handle = apply_mame(unet, min_tokens=16)
    with pretended():
        merged = counted(lambda: unet(**inputs))
    assert any(layer.merged for layer in handle.report().layers)
    assert len(merged) > len(plain)

    def attention(work: list[Work]) -> float:
        return sum(one.flops for one in work if one.kind == "attention")

    assert attention(merged) < attention(plain)
