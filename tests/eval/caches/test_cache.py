"""mame-sd-eval cache: texts, one measured passage, and the command on a tiny model."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mame_sd.errors import UserError
from mame_sd.eval.caches.cases import Case, half_of, passages, read_text, text_files
from mame_sd.eval.caches.measure import Meter, measure
from mame_sd.eval.caches.rows import all_rows
from mame_sd.eval.caches.table import format_table, summary
from mame_sd.eval.cli import app as cli
from tests.builders.tokens import word_tokenizer
from tests.caches.tiny import SHAPE, prompt, tiny

WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("model")
    word_tokenizer(["<unk>", *WORDS]).save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for source in ("a", "b"):
        (folder / source).mkdir()
        for i in range(8):
            words = random.Random(f"{source}{i}").choices(WORDS, k=3000)
            (folder / source / f"{source}{i}.txt").write_text(" ".join(words))
    return folder


def test_the_command_measures_resumes_and_prints(
    model_folder: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    line = ["cache", "--model", str(model_folder), "--texts", str(texts), "--out", str(out)]
    line += ["--num", "3", "--length", "80", "--rest", "16", "--shares", "0.25", "--offline"]
    line += ["--json"]
    assert cli.run([*line, "--rows", "random,h2o"]) == 0
    first = (out / "results.jsonl").read_text()
    capsys.readouterr()
    (out / "results.jsonl").write_text(first + '{"cut off')
    assert cli.run([*line, "--rows", "random,h2o,ours,paper,kvzip", "--dtype", "float32"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = (out / "results.jsonl").read_text()
    assert lines.startswith(first)
    assert len([x for x in lines.splitlines() if x.startswith('{"model"')]) == 3 * (1 + 5)
    kl = {e["row"]: e["kl"]["mean"] for e in found["texts"]}
    assert set(kl) == {"random", "h2o", "ours", "paper", "kvzip"}
    assert all(value > 1e-6 for value in kl.values())
    assert found["ratios"][0]["best"] in ("h2o", "kvzip")
    assert "| ours | " in format_table(found)
    assert cli.run([*line, "--rows", "random", "--dtype", "bfloat16"]) == 2
    assert "expected results of the same settings" in capsys.readouterr().err
    assert cli.run([*line, "--rows", "random", "--dtype", "bfloat16", "--out", f"{out}2"]) == 0
    halved = json.loads(capsys.readouterr().out)["texts"][0]["kl"]["mean"]
    assert halved != kl["random"]
    assert halved == pytest.approx(kl["random"], rel=0.2)
    other = shutil.copytree(model_folder, tmp_path / "other")
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(other)
    again = []
    for folder in (other, model_folder):  # each has the table of its own results
        line[2] = str(folder)
        assert cli.run([*line, "--rows", "random"]) == 0
        again.append(json.loads(capsys.readouterr().out)["texts"][0]["kl"]["mean"])
    assert again[0] != again[1] == kl["random"]
    assert cli.run([*line, "--revision", "main", "--out", f"{out}3"]) == 2
    assert "--revision: expected a hub id as --model" in capsys.readouterr().err


def test_halves_hold_other_files(texts: Path) -> None:
    def tokens(text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    names = [
        {p.name for p in passages(tokens, text_files(texts), half, 4, 80, 16)}
        for half in ("development", "report")
    ]
    assert not names[0] & names[1]
    assert {half_of(Path(n)) for n in names[0]} == {"development"}
    assert {n.split("/")[0] for n in names[0]} == {"a", "b"}
    with pytest.raises(UserError, match="--num: expected at most"):
        passages(tokens, text_files(texts), "report", 99, 80, 16)
    with pytest.raises(UserError, match="--texts: expected a folder, found none"):
        text_files(texts / "none")


def test_a_text_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected readable text"):
        read_text(tmp_path / "none.txt")


def test_scores_are_of_the_passage_that_is_asked() -> None:
    missing = [("kvzip", 0.25), ("h2o", 0.25)]
    first, second = (Case("a", prompt(64, seed=seed)[0].tolist(), [3, 4, 5]) for seed in (0, 1))
    with Meter(tiny("llama"), [3, 4]) as meter:
        rows = all_rows()
        list(measure(meter, rows, first, missing))
        found = [list(measure(meter, one, second, missing)) for one in (rows, all_rows())]
    assert found[0] == found[1]


def test_a_table_says_who_is_best() -> None:
    cases = [{"row": "full", "share": 1.0, "kl": 0.0, "nll": 1.0, "kept": 1.0, "bytes": 1.0}]
    for row, kl in (("snapkv", 0.2), ("h2o", 0.1), ("ours", 0.05), ("random", 0.01)):
        cases.append({"row": row, "share": 0.25, "kl": kl, "nll": 1.1, "kept": 0.25, "bytes": 0.25})
    results = [{"case": f"t{i}", **case} for i in range(4) for case in cases]
    ratio = summary(results)["ratios"][0]
    assert (ratio["row"], ratio["best"]) == ("ours", "h2o")  # random isn't published as a method
    assert ratio["ratio"] == pytest.approx(0.5)
