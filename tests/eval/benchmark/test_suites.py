"""The suites, their prompts, and the rows of the paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from mame_sd.cli.groups import PromptOptions
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.eval.benchmark.prompts import drawn, subjects_by_caption
from mame_sd.eval.benchmark.readme import CASES, Case
from mame_sd.eval.benchmark.rows import NAMED, chosen_rows, row_named
from mame_sd.eval.benchmark.suites import SUITES, suite_named
from mame_sd.eval.cli.prompts import suite_prompts
from mame_sd.eval.metric_list import METRICS
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.merging import Merging


def test_rows_are_chosen_by_name_and_by_number() -> None:
    def names(text: str | None) -> list[str]:
        return [row.name for row in chosen_rows(text)]

    usual = "baseline mame-default fewer-1 copied-0.125 random-0.25 tomesd-50 toma-50 mame-0.8"
    assert names(None) == [*usual.split(), "mean-attention"]
    assert [name for name in NAMED if row_named(name).default] == ["mame-default"]
    config = row_named("mame-0.7").config["mame"]
    assert (config["tau"], config["keep"]) == (0.7, None)
    assert names("random-.5, mame-default,random-5e-1,random-0.50") == [
        "baseline",
        "random-0.5",
        "mame-default",
    ]
    rows = chosen_rows("todo-2,fewer-2,random-0.25,unfitted-0.25")[1:]
    assert [(row.label, row.family) for row in rows] == [
        ("ToDo, one key of 2 × 2", "rival"),
        ("two steps fewer", "rival"),
        ("0.25 of the keys at random", "rival"),
        ("MaMe, keep 0.25 of the keys, not fitted", "mame"),
    ]
    _, fewer, _, unfitted = rows
    assert [fewer.sampling(GenerateSettings(steps=n)).steps for n in (10, 2)] == [8, 1]
    assert fewer.config == {"fewer_steps": 2}
    assert unfitted.config["mame"]["fit_queries"] == 0
    for name, expected in (
        *((f"random-{n}", f" random-{n}: expected a share") for n in ("x", "0", "1")),
        *((f"fewer-{n}", f" fewer-{n}: expected how many steps") for n in ("0", "x", "")),
        ("mame-default,tomesd-99", ": expected names of baseline, tomesd-25"),
    ):
        with pytest.raises(UserError, match=f"--rows{expected}"):
            chosen_rows(name)


def test_own_settings_and_files_of_them_are_rows(tmp_path: Path) -> None:
    *_, own = chosen_rows("mame-default", ["keep=.4,fit_queries=32,redraw=false"])
    assert own.name == "keep=.4,fit_queries=32,redraw=false"
    settings = MaMeConfig(keep=0.4, fit_queries=32, redraw=False)
    assert own.method == Merging(settings)
    (tmp_path / "by-block.json").write_text('{"layers": {"blocks.0": {"keep": 0.5}}}')
    *_, own = chosen_rows("mame-default", [str(tmp_path / "by-block.json")])
    assert own.name.endswith("-by-block.json")
    assert "/" not in own.name
    assert own.config["mame"]["layers"] == {"blocks.0": {"keep": 0.5}}
    for text, error in (
        ("keep", "keep: expected a .json file of settings such as .*, got no ending"),
        ("kep=1", "unknown setting 'kep'; did you mean 'keep'"),
        ("keep=0..5", "keep: expected a share above 0 and at most 1, got '0..5'"),
    ):
        with pytest.raises(UserError, match=error):
            chosen_rows("mame-default", [text])


def test_what_is_given_stands_over_the_suite() -> None:
    paper = SUITES["paper"]
    assert (paper.dtype, paper.num, paper.seed) == ("float32", 2000, 42)
    assert paper.scheduler == "DPMSolverMultistepScheduler"
    for suite in SUITES.values():
        assert set(suite.metrics) <= set(METRICS)
        GenerateSettings(**suite.sampling({"steps": 3, "guidance": None}))
    sampling = paper.sampling({"steps": 3, "guidance": None})
    assert (sampling["steps"], sampling["guidance"], sampling["height"]) == (3, 7.5, 768)
    with pytest.raises(UserError, match="--suite: expected one of quick, paper"):
        suite_named("huge")


def test_suites_find_their_prompts(tmp_path: Path) -> None:
    every = PromptOptions()
    quick, file = suite_prompts(SUITES["quick"], every)
    assert len(quick) == 8
    assert file["name"] == "drawn with seed 0"
    assert all(prompt.text in subjects_by_caption() for prompt in quick)
    others, file = suite_prompts(SUITES["quick"], every, held_out=True)
    assert not {prompt.text for prompt in others} & {prompt.text for prompt in quick}
    assert file["name"] == "drawn with seed 1"
    (tmp_path / "own.txt").write_text("a\nb\nc\n")
    own = PromptOptions(file=str(tmp_path / "own.txt"), num=2)
    assert [p.text for p in suite_prompts(SUITES["paper"], own)[0]] == ["a", "b"]
    with pytest.raises(UserError, match="--suite paper: expected --prompts FILE, got none"):
        suite_prompts(SUITES["paper"], every)
    with pytest.raises(UserError, match="--held-out: expected prompts that are drawn"):
        suite_prompts(SUITES["paper"], own, held_out=True)


def test_drawn_prompts_are_half_unseen_and_always_the_same() -> None:
    captions = subjects_by_caption()
    prompts = drawn(captions, 128)
    assert prompts == drawn(captions, 128)
    assert len({prompt.text for prompt in prompts}) == 128
    assert sum(prompt.extra["held_out"] for prompt in prompts) == 64
    every = drawn(captions, len(captions))
    assert {prompt.text for prompt in every} == set(captions)
    too_many = f"--num: expected at most {len(captions)} drawn prompts, got {len(captions) + 1}"
    with pytest.raises(UserError, match=too_many):
        drawn(captions, len(captions) + 1)


@pytest.mark.parametrize("case", [it for it in CASES if not it.load], ids=lambda it: it.name)
def test_every_column_of_readme_finds_its_prompts(case: Case) -> None:
    model = case.suite.model.removeprefix("embedded-")
    first = PromptOptions(num=min(case.suite.num, 128))
    tuned = {prompt.text for prompt in suite_prompts(case.suite, first, model)[0]}
    held_out = suite_prompts(case.suite, PromptOptions(), model, held_out=True)[0]
    assert len(held_out) == case.suite.num
    assert not {prompt.text for prompt in held_out} & tuned
