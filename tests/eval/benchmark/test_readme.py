"""README's table: its cases, its samples without a pipeline, and the pages that show it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DModel
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.eval.benchmark.readme import CASES, MARKER, markdown, stored, stored_case
from mame_sd.eval.benchmark.rows import Row, chosen_rows, row_named
from mame_sd.eval.benchmark.samples import Sampler, measure_samples
from mame_sd.eval.cli import app as cli
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.results.schema import Value
from mame_sd.runs.merging import Merging
from tests.builders.console import error_of
from tests.builders.tiny import tiny_unet

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLES = [
    (page.name, file, part, table)
    for page in PAGES
    for file, part, table in re.findall(
        MARKER.format(r"(\S+)", r"((?:; [^;>]+)*)") + r"\n+((?:\|.*\n)+)",
        page.read_text(encoding="utf-8"),
    )
]


assert TABLES


@pytest.mark.parametrize(("page", "file", "part", "table"), TABLES, ids=lambda value: value[:20])
def test_tables_of_pages_are_those_of_stored_results(
    page: str, file: str, part: str, table: str
) -> None:
    """To renew one, run the command that the file names, and put its table into the page."""
    content = json.loads((ROOT / file).read_text(encoding="utf-8"))
    for case in content["cases"].values():
        assert re.fullmatch(r"[0-9a-f]{40}", case["commit"]), "of a commit, without changes"
        assert "--suite readme" in case["command"]
    names, rows = (words.split() for words in [*part.split("; ")[1:], "", ""][:2])
    shown = [markdown(content, names, brief, rows) for brief in (False, True)]
    assert table.strip() in shown, f"{page}: not the table of {file}"


def test_cases_have_rows_and_metrics_that_exist() -> None:
    names = []
    for case in CASES:
        assert "mame-default" in [row.name for row in case.rows()]
        names.append(case.name)
        assert set(case.suite.metrics) <= set(METRICS)
    assert len(names) == len(set(names))


def sampler() -> Sampler:
    torch.manual_seed(0)
    unet = tiny_unet().eval()
    text = torch.zeros(1, 4, unet.config.cross_attention_dim)

    def sample(number: int, steps: int) -> Tensor:
        x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(number))
        for step in range(steps):
            x = x - unet(x, step, text).sample / steps
        return x

    return Sampler(unet, sample, {"name": "tiny"})


def test_samples_are_measured_in_draws_and_go_on(tmp_path: Path) -> None:
    ours = Row(name="ours", label="ours", family="mame",
               method=Merging(MaMeConfig(keep=0.5, min_tokens=16)))  # fmt: skip
    rows = [row_named("baseline"), ours, *chosen_rows("fewer-1,fewer-2")[1:]]
    told: list[tuple[int, int]] = []

    def measured(draws: int) -> dict[str, dict[str, Value]]:
        told.clear()
        place = tmp_path / "a.jsonl"
        return measure_samples(sampler(), rows, draws, 2, place, lambda *now: told.append(now))

    first = measured(2)
    assert set(first) == {"baseline", "ours", "fewer-1"}, "two steps can't lose two"
    assert 10 < first["fewer-1"]["psnr"].mean < first["ours"]["psnr"].mean < 100  # type: ignore[operator]
    assert first["baseline"]["speedup"].mean == 1
    more = measured(3)
    assert told[0] == (6, 9), "two draws of three rows were there"
    assert more["ours"]["psnr"].n == 3
    other = measure_samples(sampler(), rows, 2, 2, tmp_path / "b.jsonl", seed=1)
    of_draws = [3 * more["ours"]["psnr"].mean, 2 * other["ours"]["psnr"].mean]  # type: ignore[operator]
    one = measure_samples(sampler(), rows, 1, 2, tmp_path / "c.jsonl")["ours"]["psnr"].mean
    assert of_draws[0] - of_draws[1] == pytest.approx(one), "draws 1 and 2 of 0 to 2"


def test_changes_of_clips_are_compared_from_frame_to_frame(tmp_path: Path) -> None:
    unet = tiny_unet()
    pattern = {4: torch.zeros(4), 3: torch.full((4,), 0.1), 2: torch.tensor([0.1, -0.1, 0.1, -0.1])}

    def sample(number: int, steps: int) -> Tensor:
        clip = torch.rand(1, 3, 4, 8, 8, generator=torch.Generator().manual_seed(number))
        return clip + pattern[steps].view(1, 1, 4, 1, 1)

    clips = Sampler(unet, sample, {"name": "clips"}, time=2)
    found = measure_samples(clips, chosen_rows("fewer-1,fewer-2"), 2, 4, tmp_path / "a.jsonl")
    near = {name: [value[m].mean for m in ("psnr", "psnr_changes") if m in value]
            for name, value in found.items()}  # fmt: skip
    assert near["baseline"] == []
    assert near["fewer-1"] == [pytest.approx(26.02, abs=0.01), pytest.approx(150, abs=50)]
    assert near["fewer-2"] == [pytest.approx(26.02, abs=0.01), pytest.approx(20, abs=0.01)]
    cell = markdown(stored({"a": stored_case("A", {}, [
        (row, found[row.name]) for row in chosen_rows("fewer-2")
    ])}, {}))  # fmt: skip
    assert re.search(r"\| two steps fewer \| 26.0 ± [\d.]+ dB \(20.0\), ", cell)


def test_a_model_without_a_part_leaves_out_the_row_that_needs_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    unet = UNet2DModel(
        in_channels=1, out_channels=1, block_out_channels=(8, 8), norm_num_groups=4,
        layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    ).eval()  # fmt: skip

    def sample(number: int, steps: int) -> Tensor:
        noise = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(number))
        found: Tensor = unet(noise, 1).sample
        return found

    notes: list[str] = []
    measured = measure_samples(
        Sampler(unet, sample, {"name": "no MLP"}),
        chosen_rows("baseline", ["mlp_keep=0.25", "keep=0.5,min_tokens=16"]),
        draws=1,
        steps=1,
        record=tmp_path / "a.jsonl",
        on_note=notes.append,
    )
    assert list(measured) == ["baseline", "keep=0.5,min_tokens=16"]
    (note,) = notes
    assert note.startswith("left out: mlp_keep=0.25 (merging: mlp_keep: expected ")


def values(**means: float) -> dict[str, Value]:
    return {name: Value(mean=mean, low=mean - 0.1, high=mean + 0.1) for name, mean in means.items()}


def test_the_table_has_a_row_for_each_method_and_a_column_for_each_case() -> None:
    by_name = {row.name: row for row in chosen_rows("mame-default,fewer-1", ["keep=1"])}
    near = values(psnr=31.46, psnr_object=25.0, cpu_speedup=1.15)
    first = [(by_name["baseline"], values(cpu=2.0)), (by_name["mame-default"], near)]
    first.append((by_name["keep=1"], values(cpu_speedup=1.0)))
    second = [(by_name["fewer-1"], values(fd_dinov2=12.0, clip_score=80.0))]
    cases = {"a": stored_case("A", {}, first), "b": stored_case("B", {}, second)}
    content: dict[str, Any] = json.loads(json.dumps(stored(cases, {"command": "c"})))
    assert markdown(content).splitlines() == [
        "|  | A | B |",
        "|---|---|---|",
        "| **MaMe default** | 31.5 ± 0.1 dB (25.0), 1.15 times (1.05 to 1.25) |  |",
        "| `keep=1` | 1.00 times (0.90 to 1.10) |  |",
        "| one step fewer |  | FD 12.0, CLIP 80.0 |",
    ]
    cases["a"]["title"] = "A, 4 steps"
    assert markdown(content | {"cases": cases}, ["a"], brief=True).splitlines()[::2] == [
        "|  | A |",
        "| **MaMe default** | 31.5 dB, 1.15 times |",
    ]


def test_the_suite_takes_no_model_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["benchmark", "--suite", "readme", "--model", "embedded-unet"]) == 2
    assert "--suite readme: expected no model, LoRA, prompts or sampling" in error_of(capsys)
    (tmp_path / "photo.png").touch()
    for options, message in (
        ("--row kep=1", "--row kep=1: unknown setting 'kep'; did you mean 'keep'?"),
        ("--rows x", "--rows: expected names of baseline"),
        ("--case x", "--case: expected one of transformer-4, "),
        ("--out .", "got one with other things in it ('photo.png')"),
    ):
        assert cli.run(f"benchmark --suite readme {options}".split()) == 2
        assert message in error_of(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]
