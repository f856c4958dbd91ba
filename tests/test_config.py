"""Settings: what presets decide, what is refused and in which words, and the ways in and out."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mame_sd import MaMeAttnProcessor, apply_mame, mame
from mame_sd.config import MaMeConfig, Study
from mame_sd.pipelines import StableDiffusionMaMePipeline
from mame_sd.presets import COMMON, PRESETS
from tests.builders.settings import nested
from tests.builders.tiny import tiny_unet


def test_nothing_given_is_the_measured_default() -> None:
    config = MaMeConfig()
    expected = {**COMMON, **PRESETS["default"]}
    values = config.to_dict()
    values |= values["study"]
    for name, value in expected.items():
        assert values[name] == (list(value) if isinstance(value, tuple) else value), name
    assert config.tau is None
    assert config.preset == "default"
    assert dict(config.given) == {}


def test_restores_with_detail_where_each_token_goes_to_one_group() -> None:
    assert MaMeConfig(merge="qkv").detail
    for detail in (True, False):
        picked = MaMeConfig(study=Study(weights="pick", detail=detail), mlp=0.5)
        assert MaMeConfig.from_dict(picked.to_dict()).of_part("mlp").detail == detail  # type: ignore[union-attr]
    for given in (
        {"merge": "qkv", "weights": "average"},
        {"preset": "plain"},
        {"merge": "qkv", "detail": False},
    ):
        assert not MaMeConfig.from_dict(given).detail, given


@pytest.mark.parametrize(
    "fields", [{"merge": "qkv", "weights": "average"}, {"preset": "plain"}], ids=str
)
def test_detail_is_refused_with_other_weights(fields: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="detail: needs weights by which each token goes to one group"
    ):
        MaMeConfig.from_dict({"detail": True, **fields})


def test_a_given_tau_changes_nothing_but_how_much_merges() -> None:
    default, config = MaMeConfig(), MaMeConfig(tau=0.7)
    assert (config.keep, config.tau, config.batch) == (None, 0.7, "shared")
    names = ("merge", "partition", "tiles", "weights", "redraw", "pairs", "correct", "stride")
    assert [getattr(config, name) for name in names] == [getattr(default, name) for name in names]


def test_corrects_unless_told_otherwise_where_a_part_of_the_keys_is_enough() -> None:
    assert MaMeConfig().correct
    assert MaMeConfig(merge="qkv").correct
    for given in ({"weights": "pick"}, {"weights": "average"}, {"preset": "plain"}):
        assert not MaMeConfig.from_dict(given).correct, given
    assert MaMeConfig(study=Study(weights="pick", correct=True)).correct


def test_plain_is_the_paper_and_fields_beside_it_override_it() -> None:
    plain = MaMeConfig(preset="plain")
    assert (plain.tau, plain.partition, plain.tiles, plain.merge) == (0.8, "alternating", 0, "qkv")
    assert (plain.variant, plain.refine, plain.batch, plain.min_tokens) == (
        "settled",
        True,
        "shared",
        1024,
    )
    assert MaMeConfig(preset="plain", tau=0.6, study=Study(partition="random")).tau == 0.6
    assert MaMeConfig(preset="plain", keep=0.5).batch == "per_sample"


def test_variant_paper_takes_tau_and_qkv() -> None:
    config = MaMeConfig(study=Study(variant="paper"))
    assert (config.tau, config.merge, config.eps) == (0.8, "qkv", 1e-6)


def test_picking_is_of_keys_and_values_and_parts_merge_as_the_preset_says() -> None:
    assert MaMeConfig(tau=0.8, study=Study(weights="pick")).merge == "kv"
    part = MaMeConfig(study=Study(weights="pick"), mlp=0.5).of_part("mlp")
    assert part == MaMeConfig(keep=0.5, merge="qkv")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": "pick", "merge": "qkv"}, "weights: 'pick' .* needs merge='kv', got merge='qkv'"),
    ({"tau": 0.8, "keep": 0.5}, r"tau or keep, got both \(tau=0.8, keep=0.5\)"),
    ({"tau": 1.5}, "tau: .*from -1 to 1 for metric 'cosine', got 1.5"),
    ({"tau": float("nan")}, "tau: expected a number, got nan"),
    ({"tau": "high"}, "tau: expected a number, got 'high'"),
    ({"tau": True}, "tau: expected a number"),
    ({"tau": 0.1, "metric": "euclidean"}, "tau: .*'euclidean', got 0.1"),
    ({"tau": -0.1, "metric": "softmax"}, "tau: .*from 0 to 1"),
    ({"tau": float("inf"), "metric": "dot"}, "tau: expected a finite number"),
    ({"tau": 10**400, "metric": "dot"}, "tau: expected a number in the range of float"),
    ({"tau": np.float32("nan")}, "tau: expected a number, got nan"),
    ({"tau": np.True_}, "tau: expected a number"),
    ({"tau": 1j}, "tau: expected a number"),
    ({"min_tokens": np.float64(2)}, "min_tokens: expected a whole number"),
    ({"keep": 0}, "keep: .*above 0 and at most 1, got 0"),
    ({"keep": 1.01}, "keep: .*got 1.01"),
    ({"keep": float("nan")}, "keep: expected a number"),
    ({"mlp": 0}, "mlp: .*above 0 and at most 1, got 0"),
    ({"mlp": 1.5}, "mlp: .*above 0 and at most 1, got 1.5"),
    ({"mlp": "half"}, "mlp: expected a number, got 'half'"),
    ({"mlp": 0.5, "variant": "paper"}, "variant: 'paper' merges self-attention alone, got mlp=0.5"),
    ({"partition": "spiral"}, "partition: expected one of alternating, .*got 'spiral'"),
    ({"metric": "l1"}, "metric: expected one of cosine"),
    ({"feature": "q"}, "feature: expected one of x, k"),
    ({"variant": "ours"}, "variant: expected one of settled, paper"),
    ({"merge": "q"}, "merge: expected one of qkv, kv"),
    ({"preset": "fast"}, "preset: expected one of default, plain"),
    ({"stride": (2,)}, r"stride: expected two whole numbers of at least 1, got \(2,\)"),
    ({"stride": (0, 2)}, "stride: "),
    ({"stride": (1, 1)}, "stride: .*leaves nothing to merge"),
    ({"stride": 2}, "stride: expected two whole numbers"),
    ({"size": (64, 1.5)}, "size: expected two whole numbers"),
    ({"seed": -1}, "seed: expected a whole number from 0 to"),
    ({"min_tokens": 0}, "min_tokens: expected a whole number from 1 to"),
    ({"min_tokens": 2.0}, "min_tokens: .*got 2.0"),
    ({"tiles": 1}, "tiles: expected a side of at least 2 tokens, or 0 for none, got 1"),
    ({"eps": 0.0}, "eps: expected a finite number above 0"),
    ({"refine": "yes"}, "refine: expected True or False, got 'yes'"),
    ({"redraw": 1}, "redraw: expected True or False, got 1"),
    ({"pairs": 1}, "pairs: expected True or False, got 1"),
    ({"keep": 0.5, "batch": "shared"}, "unknown setting 'batch'"),
    ({"variant": "paper", "keep": 0.5}, "variant: 'paper' knows only tau"),
    (
        {"variant": "paper", "merge": "kv"},
        "variant: 'paper' knows only tau, merge='qkv'.*merge='kv'",
    ),
    ({"taw": 0.8}, "unknown setting 'taw'; did you mean 'tau'"),
]


def test_keep_chooses_the_cell_with_as_many_destinations_as_it_allows() -> None:
    keeps = (0.75, 0.5, 0.4, 0.375, 0.37, 0.25, 0.13, 0.1, 0.0625, 0.01)
    chosen = [(1, 2), (1, 2), (1, 3), (1, 3), (2, 2), (2, 2), (2, 4), (3, 4), (4, 4), (4, 4)]
    assert [MaMeConfig(keep=keep).stride for keep in keeps] == chosen
    assert MaMeConfig(keep=0.34, tiles=0).stride == (1, 3), "no tile's border cuts a cell"
    assert MaMeConfig(keep=0.5, study=Study(stride=(2, 2))).stride == (2, 2)
    assert MaMeConfig(tau=0.8).stride == (2, 2)
    assert MaMeConfig(keep=0.5).replace(keep=0.25).stride == (2, 2)


def test_the_default_is_drawn_anew() -> None:
    assert MaMeConfig().redraw
    assert MaMeConfig(tau=0.8).redraw
    assert MaMeConfig(keep=0.5, study=Study(partition="random")).redraw
    for given in ({"preset": "plain"}, {"preset": "plain", "keep": 0.5}, {"redraw": False}):
        assert not MaMeConfig.from_dict(given).redraw, given
    part = MaMeConfig(tau=0.8, mlp=0.5).of_part("mlp")
    assert part is not None
    assert (part.partition, part.redraw) == ("random-grid", True)
    kept = MaMeConfig(tau=0.8, study=Study(partition="alternating", redraw=True), mlp=0.5).of_part(
        "mlp"
    )
    assert kept is not None
    assert (kept.partition, kept.redraw) == ("alternating", True)


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[str(values) for values, _ in REFUSED])
def test_refusals_name_the_field_what_was_expected_and_what_came(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MaMeConfig.from_dict(values)


@pytest.mark.parametrize(
    ("metric", "tau"),
    [("cosine", -1), ("cosine", 1), ("dot", 17.0), ("dot", -3), ("euclidean", -2), ("softmax", 0)],
)
def test_the_range_of_tau_follows_the_metric(metric: Any, tau: float) -> None:
    assert MaMeConfig(study=Study(metric=metric), tau=tau).tau == tau


def test_replace_lets_the_preset_decide_again() -> None:
    config = MaMeConfig(tau=0.8, seed=3)
    kept = config.replace(keep=0.5)
    assert (kept.tau, kept.keep, kept.merge, kept.batch, kept.tiles, kept.seed) == (
        None,
        0.5,
        "kv",
        "per_sample",
        16,
        3,
    )
    assert kept.replace(tau=0.8) == config
    assert config.replace(tau=None) == MaMeConfig(seed=3)
    assert MaMeConfig(keep=0.5).replace(tau=0.9).batch == "shared"
    assert config.replace(tau=0.9).tau == 0.9
    assert config.tau == 0.8
    with pytest.raises(ValueError, match="got both"):
        config.replace(tau=0.5, keep=0.5)


def test_numbers_of_numpy_become_pythons_own() -> None:
    config = MaMeConfig(
        tau=np.float32(0.5),
        seed=np.int64(3),
        study=Study(stride=(np.int32(3), np.uint8(2))),
        tiles=np.int64(0),
    )  # type: ignore[arg-type]
    assert config == MaMeConfig(tau=0.5, seed=3, study=Study(stride=(3, 2)), tiles=0)
    assert {type(n) for n in (config.tau, config.seed, *config.stride)} == {float, int}
    assert MaMeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert MaMeConfig.from_dict({"keep": Fraction(1, 2)}).keep == 0.5
    assert type(MaMeConfig(tau=1).tau) is float


CONFIGS = [
    MaMeConfig(),
    MaMeConfig(tau=0.8),
    MaMeConfig(keep=0.5, tiles=0),
    MaMeConfig(tau=0.8, mlp=0.5),
    MaMeConfig(keep=0.5, merge="qkv", study=Study(partition="grid"), mlp=0.75),
    MaMeConfig(preset="plain", study=Study(stride=(3, 2)), size=(64, 48)),
    MaMeConfig(study=Study(variant="paper", eps=1e-4)),
]
COPIES: dict[str, Callable[[MaMeConfig], MaMeConfig]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "json": lambda config: MaMeConfig.from_dict(
        json.loads(json.dumps(config.to_dict(given_only=True)))
    ),
    "replace": lambda config: config.replace(),
    "copy.replace": lambda config: config.__replace__(),  # what Python 3.13's copy.replace calls
    "dataclasses.replace": dataclasses.replace,
}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_is_the_same_in_all_it_does(
    copied: Callable[[MaMeConfig], MaMeConfig], config: MaMeConfig
) -> None:
    twin = copied(config)
    assert twin == config
    assert hash(twin) == hash(config)
    assert twin.given == config.given
    for changes in (
        {"seed": 1},
        {"tau": 0.3, "weights": None},
        {"preset": "default", "merge": None},
    ):
        assert twin.replace(**changes) == config.replace(**changes)
    assert twin.of_part("mlp") == config.of_part("mlp")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_dictionary_of_every_field_brings_back_an_equal_config(config: MaMeConfig) -> None:
    values = config.to_dict()
    twin = MaMeConfig.from_dict(json.loads(json.dumps(values)))
    assert twin == config
    assert twin.to_dict() == values
    assert values["tiles"] == config.tiles
    assert twin.of_part("mlp") == config.of_part("mlp")


def test_dataclasses_replace_lets_the_preset_decide_again() -> None:
    assert dataclasses.replace(MaMeConfig(keep=0.5, tiles=0)).tiles == 0
    config = MaMeConfig(keep=0.5, tiles=0, seed=3)
    for changes in (
        {"seed": 1},
        {"keep": 0.25},
        {"tau": 0.8},
        {"tiles": 8},
        {"tiles": None},
        {"merge": "qkv"},
    ):
        changed = dataclasses.replace(config, **changes)
        assert changed == config.replace(**changes)
        assert changed.given == config.replace(**changes).given
    with pytest.raises(ValueError, match="keep: expected a share"):
        dataclasses.replace(config, keep=2)


def test_a_part_keeps_tiles_that_stand_beside_tau() -> None:
    fields = {"preset": "plain", "tau": 0.8, "weights": "best", "tiles": 16, "partition": "grid"}
    part = MaMeConfig(**nested(fields), mlp=0.5).of_part("mlp")
    assert part is not None
    assert (part.tiles, part.weights) == (16, "best")
    part = MaMeConfig(tau=0.8, tiles=8, mlp=0.5).of_part("mlp")
    assert part is not None
    assert (part.tiles, part.weights) == (8, "best")


def test_a_part_merges_alike_in_equal_configs() -> None:
    config = MaMeConfig(mlp=0.5, min_tokens=64)
    twin = MaMeConfig.from_dict(config.to_dict())
    assert twin == config
    assert (
        twin.of_part("mlp")
        == config.of_part("mlp")
        == MaMeConfig(keep=0.5, merge="qkv", min_tokens=64)
    )
    assert config.replace(mlp=None).of_part("mlp") is None
    config = MaMeConfig(tau=0.8, mlp=0.5)
    in_full = MaMeConfig.from_dict(config.to_dict())
    assert (
        in_full
        == config
        == MaMeConfig(tau=0.8, mlp=0.5, study=Study(partition="random-grid", redraw=True))
    )
    part = config.of_part("mlp")
    assert (
        part
        == in_full.of_part("mlp")
        == config.replace(partition="random-grid", redraw=True).of_part("mlp")
    )
    plain = MaMeConfig(preset="plain", mlp=0.5).of_part("mlp")
    assert plain is not None
    assert (plain.keep, plain.tau, plain.partition, plain.tiles, plain.batch) == (
        0.5,
        None,
        "alternating",
        0,
        "per_sample",
    )


def test_a_config_is_frozen_and_hashable() -> None:
    config = MaMeConfig(tau=0.8, study=Study(stride=[2, 3]))  # type: ignore[arg-type]
    assert config.stride == (2, 3)
    assert {config: 1}[MaMeConfig(tau=0.8, study=Study(stride=(2, 3)))] == 1
    with pytest.raises(FrozenInstanceError):
        config.tau = 0.9  # type: ignore[misc]


def test_every_field_has_help() -> None:
    for f in fields(MaMeConfig):
        assert f.metadata["help"].strip(), f.name


def test_files_hold_given_fields(tmp_path: Path) -> None:
    toml, jsons = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('tau = 0.7\n[study]\nstride = [3, 3]\npartition = "grid"\n')
    jsons.write_text('{"tau": 0.7, "study": {"stride": [3, 3], "partition": "grid"}}')
    expected = MaMeConfig(tau=0.7, study=Study(stride=(3, 3), partition="grid"))
    for path in (toml, jsons):
        assert MaMeConfig.from_file(path) == expected
        assert MaMeConfig.from_file(str(path)).given == expected.given


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"tau": ', "expected json, but"),
        ("a.toml", b"tau = = 1", "expected toml, but"),
        ("a.json", b"[0.8]", "expected an object of settings"),
        ("a.json", b"\xff\xfe\x00", "can be read"),
        ("a.json", None, "can be read"),
        ("a.json", b'{"tau": 7}', "a.json: tau: expected"),
        ("a.json", b"[" * 100_000, "a.json: expected json, but maximum recursion depth exceeded"),
        (
            "a.toml",
            b"a = " + b"[" * 5000,
            "a.toml: expected toml, but maximum recursion depth exceeded",
        ),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        MaMeConfig.from_file(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["kv", "best", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from([*(f.name for f in fields(MaMeConfig) if f.init), "surprise"])


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@hypothesis.given(
    st.dictionaries(NAMES, VALUES, max_size=4).map(json.dumps).map(str.encode) | st.binary()
)
def test_any_bytes_are_settings_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    for ending in ("json", "toml"):
        path = tmp_path_factory.getbasetemp() / f"any.{ending}"
        path.write_bytes(data)
        message, config = str(path), None
        try:
            config = MaMeConfig.from_file(path)
        except ValueError as error:
            message = str(error)
        assert message.startswith(str(path))
        if config is not None:
            assert (
                MaMeConfig.from_dict(json.loads(json.dumps(config.to_dict()))).to_dict()
                == config.to_dict()
            )


def test_files_may_begin_with_a_mark_and_name_a_field_once(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'\xef\xbb\xbf{"keep": 0.5}')
    assert MaMeConfig.from_file(path).keep == 0.5
    path.write_text('{"keep": 0.5, "keep": 0.25}')
    with pytest.raises(ValueError, match="'keep' stands in one object twice"):
        MaMeConfig.from_file(path)


def test_a_seed_that_is_too_large_is_told_the_largest() -> None:
    with pytest.raises(ValueError, match=r"from 0 to 2\^63 - 1, got 9223372036854775808"):
        MaMeConfig(seed=2**63)


@pytest.mark.parametrize(
    "call",
    [
        lambda: MaMeConfig(keep=0.5, weights="pick"),
        lambda: apply_mame(tiny_unet(), weights="pick"),
        lambda: mame(tiny_unet(), weights="pick").__enter__(),
        lambda: MaMeAttnProcessor(weights="pick"),
        lambda: StableDiffusionMaMePipeline.from_pretrained("none", weights="pick"),
    ],
    ids=["config", "apply", "block", "processor", "pipeline"],
)
def test_a_flat_name_is_told_its_new_place(call: Callable[[], object]) -> None:
    message = r"^weights: moved to Study; give study=Study\(weights='pick'\)$"
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("name", ["a.json", "a.toml"])
def test_a_flat_name_in_a_file_is_told_its_new_place(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text({"a.json": '{"weights": "pick"}', "a.toml": 'weights = "pick"'}[name])
    with pytest.raises(ValueError, match=r"a\..*weights: belong to study; write them in it"):
        MaMeConfig.from_file(path)


def test_study_holds_what_ablations_vary(tmp_path: Path) -> None:
    config = MaMeConfig(keep=0.5, study=Study(weights="pick"))
    assert (config.weights, config.study.weights, config.study.metric) == ("pick", "pick", "cosine")
    assert config.to_dict(given_only=True) == {"keep": 0.5, "study": {"weights": "pick"}}
    for values in (config.to_dict(), config.to_dict(given_only=True)):
        assert MaMeConfig.from_dict(values) == config
    assert config.replace(study=None).given == {"keep": 0.5}
    assert config.replace(study={"metric": "dot"}).study.metric == "dot"
    assert dataclasses.replace(config, keep=0.25).given == {"keep": 0.25, "weights": "pick"}
    assert dataclasses.replace(config, study=Study(weights="best")).weights == "best"
    for wrong, message in (
        ({"weight": "pick"}, "got 'weight'"),
        (3, "expected a Study or a mapping"),
    ):
        with pytest.raises(ValueError, match=message):
            MaMeConfig(study=wrong)
