"""Names of rows, suites, and rivals brought to equal FLOPs by counting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mame_sd.errors import UserError
from mame_sd.eval.perception.methods import RIVALS, Method, at_flops, merged
from mame_sd.eval.perception.rows import BASELINE, SUITES, chosen_rows, row_named
from mame_sd.perception.settings import FIRST, LEFT
from mame_sd.runs.merging import NotApplicable
from tests.builders.perception import PATCHES, ROWS, SIDE

VIT = next(row for row in ROWS if row.name == "ViTForImageClassification")
SIGLIP = next(row for row in ROWS if row.name == "Siglip2ForImageClassification")


TAU = {"tau": 0.8, "blocks": "first"}
OURS = {"left": LEFT, "schedule": "decreasing", "first": FIRST}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("baseline", {}),
        ("mame-default", {"mame": {"blocks": None, "defaults": OURS}}),
        ("default-0.8", {"mame": {"keep": 0.8, "blocks": None, "defaults": OURS}}),
        ("mame-0.8", {"mame": TAU}),
        ("mame-quarters-0.5", {"mame": {"tau": 0.5, "blocks": "quarters"}}),
        ("mame-last-0.5", {"mame": {"tau": 0.5, "blocks": (-1,)}}),
        ("tome-8", {"rival": {"name": "ToMe", "r": 8.0, "decreasing": False}}),
        ("tome-decreasing-8", {"rival": {"name": "ToMe", "r": 8.0, "decreasing": True}}),
        ("evit-0.7", {"rival": {"name": "EViT", "keep": 0.7}}),
        ("mame-0.8-random-3", {"mame": {**TAU, "ablation": {"partition": "random", "seed": 3}}}),
        ("mame-third-0.7", {"mame": {"tau": 0.7, "blocks": "third"}}),
        ("random-all-0.9", {"rival": {"name": "RandomDrop", "keep": 0.9, "seed": 0}}),
        ("smaller-160", {"side": 160}),
    ],
)
def test_a_name_says_what_runs(name: str, config: dict[str, Any]) -> None:
    row = row_named(name)
    assert (row.name, row.method.config) == (name, config)


OTHERS = "mame-2 mame-quarters-x tome tome-0 evit-1.5 smaller-10.5 diffrate-x mame-0.8-x"
OTHERS += " tome@baseline tome@tome@mame-0.8"


@pytest.mark.parametrize("name", OTHERS.split())
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="--rows: expected names such as baseline"):
        chosen_rows("vit", name)


def test_a_rival_comes_after_the_row_whose_flops_it_takes() -> None:
    assert [row.name for row in chosen_rows("vit", "evit@mame-0.5,mame-0.5,tome-4")] == [
        "baseline",
        "mame-0.5",
        "evit@mame-0.5",
        "tome-4",
    ]
    with pytest.raises(UserError, match=r"--suite: expected one of vit, ablation, got 'x'"):
        chosen_rows("x", None)


@pytest.mark.parametrize("suite", SUITES)
def test_rows_of_a_suite_have_names_of_their_own_and_are_found_by_them(suite: str) -> None:
    rows = chosen_rows(suite, None)
    names = [row.name for row in rows]
    assert len({*names}) == len(names) == len({row.label for row in rows})
    assert names[0] == BASELINE
    assert chosen_rows(suite, ",".join(names)) == rows
    assert all(row.at is None or names.index(row.at) < names.index(row.name) for row in rows)


@torch.no_grad()
def test_every_ablation_runs_on_a_vit_and_does_something_of_its_own() -> None:
    model, inputs = VIT.build(), VIT.batch(2)
    seen = []
    for row in chosen_rows("ablation", None):
        method = row.method
        if row.name.startswith("mame-0.8"):  # random patches are less alike
            fields = method.config["mame"]
            method = merged(**{**fields, "tau": fields["tau"] if "metric" in fields else 0.3})
        with method.counting(model) as handle:
            logits = model(**inputs).logits
            kept = [block.tokens_kept for block in handle.report().layers]
        if row.name.startswith("mame-0.8"):
            assert kept[0] < 37 or row.name.endswith("euclidean"), row.name
            if "restored" not in row.name:  # a class token alone is read
                seen.append(logits)
    for number, one in enumerate(seen):
        assert not any(torch.equal(one, other) for other in seen[:number]), number
    assert len(seen) == 14


def call_of(model: Any, inputs: Any) -> Any:
    return lambda: model(**inputs)


def flops_of(model: Any, method: Method, inputs: Any) -> float:
    with method.counting(model) as handle, torch.no_grad():
        model(**inputs)
        return handle.report().flops


@pytest.mark.parametrize("name", ["default", "tome-decreasing", "evit", "smaller"])
def test_a_rival_comes_as_near_to_the_flops_as_its_knob_allows(name: str) -> None:
    model, inputs = VIT.build(), VIT.batch(1)
    whole = flops_of(model, Method(), inputs)
    target, make = 0.6 * whole, RIVALS[name].make
    knob, flops = at_flops(model, name, target, call_of(model, inputs), SIDE)
    assert flops == flops_of(model, make(knob), inputs)
    step = {"tome-decreasing": 0.5, "smaller": 4.0}.get(name, 1 / PATCHES)
    for other in (knob - step, knob + step):  # FLOPs grow, or shrink, with the knob
        assert abs(flops - target) <= abs(flops_of(model, make(other), inputs) - target) + 1e-9
    if name in ("tome-decreasing", "smaller"):  # beyond reach: the end of the range
        most = at_flops(model, name, 2 * whole, call_of(model, inputs), SIDE)[1]
        least = at_flops(model, name, 0.0, call_of(model, inputs), SIDE)[1]
        assert least < target < 0.99 * whole <= most


def test_what_a_rival_lacks_is_said() -> None:
    clips = next(row for row in ROWS if row.name == "VideoMAEForVideoClassification")
    for row, name, reason in (
        (clips, "smaller", "images of one size"),
        (SIGLIP, "smaller", "images of one size"),
        (SIGLIP, "evit", "class token"),
    ):
        model, inputs = row.build(), row.batch(1)
        with pytest.raises(NotApplicable, match=reason):
            at_flops(model, name, 1e5, call_of(model, inputs), 0)
    assert at_flops(model, "tome", 1e5, call_of(model, inputs), 0)[0] > 0
    reason = "this model can't merge like this: blocks: expected how many of the 4 blocks"
    with pytest.raises(NotApplicable, match=reason), merged(9, tau=0.8).counting(model):
        pass
