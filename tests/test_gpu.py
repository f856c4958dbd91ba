"""The benchmark of graphics cards: what it counts, what it keeps, and what it says where it
can't.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_card, gpu_models, gpu_published
from benchmarks.gpu_models import CASES, Case
from mame_sd.core import cards
from mame_sd.core.cards import CARDS
from tests.builders.tiny import tiny_unet

SMALL = Case("sd2.1", 256)


def test_kernels_are_counted_once_and_kept_until_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "small", SMALL)
    rows = {name: gpu_models.rows_of(SMALL)[name] for name in ("unmerged", "tomesd, half")}
    both = [CARDS["A100"], CARDS["H100"]]
    found = gpu.reckon(gpu.Traces(tmp_path), "small", rows, both, 6e-6)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(gpu, "count", None)  # it can't be called
    assert gpu.reckon(gpu.Traces(tmp_path), "small", rows, both, 6e-6) == found
    assert found["tomesd, half"]["launches"][0] > found["unmerged"]["launches"][0]
    assert found["unmerged"]["busy_ms"]["A100"] > found["unmerged"]["busy_ms"]["H100"]
    lines = gpu.table("small", found, both, 6e-6).splitlines()
    assert lines[2].split(" | ")[1:] == ["launches", "A100", "H100 |"]
    assert any(line.startswith("| tomesd, half | ") for line in lines)
    monkeypatch.setattr(gpu, "_fingerprint", lambda: "other")
    with pytest.raises(TypeError):
        gpu.Traces(tmp_path).of("small", SMALL, "unmerged", rows["unmerged"])


def test_a_model_cut_in_depth_stands_for_all_of_its_blocks() -> None:
    whole, cut = (
        gpu_models._cut(gpu_models._WAN, {"num_layers": n}, **more)
        for n, more in ((4, {}), (2, {"blocks": 3}))
    )
    work = [gpu.count(case, gpu_models.rows_of(case)["unmerged"]) for case in (whole, cut)]
    assert work[0] == work[1]


def test_rows_are_measured_beside_unmerged_on_the_device_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unet = tiny_unet()
    monkeypatch.setattr(Case, "build", lambda self, device: unet)
    monkeypatch.setitem(gpu_models.unets.CONFIGS, "sd2.1", dict(unet.config))
    case = Case("sd2.1", 64, dtype=torch.float32)
    rows = {
        name: gpu_models.rows_of(case)[name] for name in ("unmerged", "ToDo (every fourth key)")
    }
    found = gpu.measure(case, rows, torch.device("cpu"), 1)
    assert found["unmerged"]["times_as_fast"] == 1
    assert all(row["median_s"] > 0 for row in found.values())


def test_a_cards_own_figures_are_measured_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_card, "ROUNDS", 1)
    card = gpu_card.measured_card(torch.device("cpu"), "this one", side=64)
    assert min(card.bandwidth, card.half, card.tf32, card.single, card.attention) > 0
    path = tmp_path / "folder" / "cards.json"
    monkeypatch.setenv("MAME_SD_CARDS", str(path))
    gpu_card.keep(CARDS["A100"], path)
    gpu_card.keep(card, path)
    assert cards._measured("this one") == card
    assert cards._measured("A100") == CARDS["A100"]


def test_the_default_of_all_cases_is_told_at_a_glance() -> None:
    found = {
        "a": {
            row: {key: {"A100": ms} for key in ("busy_ms", "eager_ms")}
            for row, ms in (("unmerged", 3.0), ("default", 2.0))
        }
    }
    assert "| a | 1.50 (1.50) |" in gpu.summary(found, [CARDS["A100"]])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--measure"], "--measure: expected a CUDA device, found none"),
        (["--card", "5090"], "--card: expected a part of one of GeForce RTX 3060"),
        (["--model", "SD 9"], "--model: expected a part of one of SD 1.5 at 512"),
        (["--launch-us", "0"], "--launch-us: expected a number above 0, got 0"),
    ],
)
def test_bad_options_are_one_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        gpu.main(given)
    assert error.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_json_says_that_it_is_reckoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "CASES", {"small": SMALL})
    gpu.main(["--rows", "unmerged", "--json", "--out", str(tmp_path)])
    said = json.loads(capsys.readouterr().out)
    assert (said["measured"], said["note"]) == (False, gpu.RECKONED)


def test_published_figures_name_known_cards_cases_and_rows() -> None:
    for figure in gpu_published.FIGURES:
        assert figure.card in CARDS
        assert figure.case in CASES
        assert figure.row in gpu_models.PUBLISHED_ROWS
    for _, case, share, row in gpu_published.SAVED:
        assert row in gpu_models.rows_of(CASES[case])
        assert 0 < share < 1
