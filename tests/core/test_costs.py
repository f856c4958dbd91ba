"""What a layer costs with and without merging: as the library's own kernels have it, counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_added import EARLY, FORMS, LATE, SAMPLES, masked
from mame_sd.core.cards import CARDS
from mame_sd.core.costs import Call, Form, times_as_fast, work_of

CALL = Call(2, 4096, 0, 320, 320, 8, torch.float16)
KEYS = Form(queries=False, early=True)


def test_products_and_attention_are_those_of_the_tokens_that_stay() -> None:
    plain, kept, whole = (
        work_of(CALL),
        work_of(CALL, 0.25, KEYS),
        work_of(CALL, 0.5, Form(True, True)),
    )
    assert [one.name for one in plain] == ["linear", "linear", "linear", "attention", "linear"]
    assert plain[0].flops == 2 * 2 * 4096 * 320 * 320
    assert plain[3].flops == 4 * 2 * 320 * 4096 * 4096
    assert [one.flops / all_.flops for one, all_ in zip(kept, plain, strict=True)] == [
        1,
        0.25,
        0.25,
        0.25,
        1,
    ]
    assert [one.flops / all_.flops for one, all_ in zip(whole, plain, strict=True)] == [
        0.5,
        0.5,
        0.5,
        0.25,
        0.5,
    ]
    late = work_of(CALL._replace(context=77), 0.25, Form(False, False))
    assert late[1].flops == work_of(CALL._replace(context=77))[1].flops


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
def test_merging_gains_more_in_larger_layers_and_nothing_in_small_ones(card: object) -> None:
    gains = [
        times_as_fast(card, CALL._replace(tokens=n * n), 0.25, KEYS) for n in (8, 32, 64, 96, 128)
    ]  # type: ignore[arg-type]
    assert gains == sorted(gains)  # type: ignore[type-var]
    assert gains[0] < 1 < gains[-1]  # type: ignore[operator]


def test_a_form_that_was_not_counted_has_no_cost() -> None:
    assert times_as_fast(CARDS["A100"], CALL, 0.5, Form(True, True, "average")) is None


# One layer of each kind suffices to see that kernels or bytes have changed; `benchmarks.gpu_added`
# counts all.
@pytest.mark.parametrize(
    ("kind", "name", "form"),
    [
        (FORMS[form][0], name, form)
        for form in FORMS
        for name in SAMPLES[FORMS[form][0]]
        if name
        in (
            "SD 1.5 at 512, first level",
            "SDXL at 1024, last attention",
            "SD 3.5 large at 1024",
        )
    ],
    ids=str,
)
def test_what_is_reckoned_is_what_is_counted(kind: str, name: str, form: Form) -> None:
    sample = SAMPLES[kind][name]
    plain, merged, share = sample.work(None), sample.work(form), FORMS[form][1]["keep"]
    for card in CARDS.values():
        reckoned = times_as_fast(card, sample.call, share, masked(form, sample))
        assert reckoned == pytest.approx(card.busy(plain) / card.busy(merged), rel=0.15), card.name


def test_every_kind_of_layer_has_a_form_counted() -> None:
    assert {kind for kind, _ in FORMS.values()} == {EARLY, LATE} == set(SAMPLES)
