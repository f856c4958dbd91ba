"""The suite `trained`: which models it finds, and its figures from the answers of each seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from scipy import stats

from mame_sd.errors import UserError
from mame_sd.eval.cli import app as cli
from mame_sd.eval.perception.data import open_images
from mame_sd.eval.perception.forms import FORMS, PLAIN, find_models
from tests.builders.benchmarks import results_of
from tests.builders.classification import draw_classes, save_classifier


def save_form(folder: Path, form: str, seed: int, weights: int) -> None:
    out = save_classifier(folder / "models" / f"{form}-{seed}", seed=weights)
    (out / "training.json").write_text("{}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of the unmerged model and of two other forms, all weights different; pictures."""
    place = tmp_path_factory.mktemp("trained")
    for number, (form, seed) in enumerate(
        (form, seed) for form in (PLAIN, "last", "continued") for seed in (0, 3)
    ):
        save_form(place, form, seed, number)
    draw_classes(place / "pictures")
    return place


def words(folder: Path, out: Path) -> list[str]:
    given = "classify --suite trained --batch-size 5 --rounds 1 --device cpu"
    rows = ["--rows", "mame-last,continued,mame-scratch"]
    return [*given.split(), *rows, "--trained", str(folder), "--out", str(out)]


def test_models_are_those_of_seeds_that_all_forms_have(folder: Path, tmp_path: Path) -> None:
    found = find_models(folder)
    assert (found.seeds, found.forms) == ((0, 3), (PLAIN, "last", "continued"))
    assert found.model("last", 3) == folder / "models" / "last-3"
    shutil.copytree(folder, tmp_path / "fewer")
    (tmp_path / "fewer" / "models" / "last-3" / "training.json").unlink()  # not whole yet
    assert find_models(tmp_path / "fewer").seeds == (0,)
    shutil.rmtree(tmp_path / "fewer" / "models" / "last-0")
    assert find_models(tmp_path / "fewer").forms == (PLAIN, "continued")
    for seed in (0, 3):
        shutil.rmtree(tmp_path / "fewer" / "models" / f"{PLAIN}-{seed}")
    with pytest.raises(
        UserError,
        match=r"expected models/plain-SEED, .* found continued-0, continued-3; train with",
    ):
        find_models(tmp_path / "fewer")
    with pytest.raises(UserError, match="found none"):
        find_models(tmp_path)


def test_figures_are_those_of_each_seeds_answers(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.run(words(folder, out)) == 0
    results = results_of(out)
    rows = {row["name"]: row["values"] for row in results["rows"] if row["measured"]}
    labels = open_images(folder / "pictures").labels
    assert labels is not None

    def answers(row: str, seed: int) -> list[int]:
        lines = (out / "answers" / f"{row}-{seed}.0.jsonl").read_text().splitlines()
        batches = sorted((json.loads(line) for line in lines[1:]), key=lambda line: line["batch"])
        return [answer for batch in batches for answer in batch["answers"]]

    def shares(row: str) -> list[float]:
        return [
            100 * sum(a == b for a, b in zip(answers(row, seed), labels, strict=True)) / 12
            for seed in (0, 3)
        ]

    assert len({tuple(shares(row)) for row in rows}) > 1  # else nothing is told apart
    for name, values in rows.items():
        assert values["top1"]["seeds"] == pytest.approx(shares(name))
        assert values["top1"]["mean"] == pytest.approx(sum(shares(name)) / 2)
        assert 0 <= values["top1"]["low"] <= values["top1"]["high"] <= 100
        if name == "baseline":
            assert values["gain"]["withheld"] == "the unmerged model itself"
            continue
        gains = [ours - plain for ours, plain in zip(shares(name), shares("baseline"), strict=True)]
        low, high = stats.t.interval(0.95, 1, sum(gains) / 2, abs(gains[0] - gains[1]) / 2 or 1e-12)
        assert (values["gain"]["low"], values["gain"]["high"]) == pytest.approx(
            (low, high), abs=1e-6
        )
        same = [
            100
            * sum(
                a == b for a, b in zip(answers(name, seed), answers("baseline", seed), strict=True)
            )
            / 12
            for seed in (0, 3)
        ]
        assert values["agreement"]["seeds"] == pytest.approx(same)
    assert rows["mame-last"]["tokens"]["mean"] == 19
    assert (
        rows["mame-last"]["flops"]["mean"]
        < rows["continued"]["flops"]["mean"]
        == rows["baseline"]["flops"]["mean"]
    )
    missing = next(row for row in results["rows"] if row["name"] == "mame-scratch")
    assert (
        missing["reason"] == "expected models of the form 'scratch', found none; train them first"
    )
    assert "interval over trainings" in (out / "report.html").read_text(encoding="utf-8")
    assert "Gain" in (out / "report.md").read_text(encoding="utf-8")
    assert cli.run(words(folder, out)) == 0  # continued: nothing is answered again
    again = {row["name"]: row["values"] for row in results_of(out)["rows"]}
    assert all(again[name]["gain"] == values["gain"] for name, values in rows.items())


BAD = {
    "no folder": ("--suite trained", "--trained: expected the folder that scripts/training/"),
    "other suite": ("--suite vit --trained {}", "--trained: expected it with --suite trained"),
    "a model": (
        "--suite trained --trained {} --model x",
        "--model x: expected none beside --trained",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    given, message = BAD[name]
    line = ["classify", *given.format(folder).split(), "--out", str(tmp_path / "out")]
    assert cli.run(line) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out").exists()


def test_every_form_begins_with_one_that_is_trained_before() -> None:
    names = list(FORMS)
    assert all(
        form.begins is None or names.index(form.begins) < names.index(form.name)
        for form in FORMS.values()
    )
