"""tomesd as a method of a run: it merges, leaves no trace, and says where it can do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.eval.benchmark.rows import Row
from mame_sd.eval.benchmark.tomesd import ToMeSD
from mame_sd.eval.metric_list import METRICS
from mame_sd.runs.generate import generate
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.methods import Merging, NotApplicable
from mame_sd.runs.model_files import ModelChoice
from tests.builders.benchmarks import LIKE_SDXL, PROMPTS, SETTINGS, benchmark, rivals, tiny_rows
from tests.builders.kills import snapshot
from tests.builders.tiny import save_tiny_pipeline


@rivals
def test_tomesd_merges_leaves_no_trace_and_resumes_to_the_same_pixels(
    model: LoadedModel, tmp_path: Path
) -> None:
    generate(model, PROMPTS, SETTINGS, None, tmp_path / "before")
    summary_of_run = generate(model, PROMPTS, SETTINGS, ToMeSD(0.5), tmp_path / "tomesd")
    assert summary_of_run.levels[0] == {
        "level": 0,
        "tokens_in": 256,
        "tokens_kept": 128,
        "share": 0.5,
    }
    assert summary_of_run.levels[1]["share"] == 1
    generate(model, PROMPTS, SETTINGS, None, tmp_path / "after")
    assert snapshot(tmp_path / "before") == snapshot(tmp_path / "after")
    assert not any(hasattr(module, "_tome_info") for module in model.pipe.unet.modules())
    whole = snapshot(tmp_path / "tomesd")
    assert whole != snapshot(tmp_path / "before")
    (tmp_path / "tomesd" / "images" / "p00003_0.png").unlink()
    torch.manual_seed(99)
    assert generate(model, PROMPTS, SETTINGS, ToMeSD(0.5), tmp_path / "tomesd").made == 1
    assert snapshot(tmp_path / "tomesd") == whole
    with pytest.raises(UserError, match=r"rival.ratio: 0.5 there, 0.25 here"):
        generate(model, PROMPTS, SETTINGS, ToMeSD(0.25), tmp_path / "tomesd")


@rivals
def test_tomesd_says_where_it_can_do_nothing(tmp_path: Path) -> None:
    folder = save_tiny_pipeline(tmp_path / "like-sdxl", **LIKE_SDXL)
    like_sdxl = load_model(ModelChoice(model=str(folder), device="cpu"))
    with pytest.raises(NotApplicable, match="only at the largest level"):
        generate(like_sdxl, PROMPTS, SETTINGS, ToMeSD(0.5), tmp_path / "run")
    config = MaMeConfig(keep=0.5, min_tokens=16)
    rows = [*tiny_rows()[:2], Row(name="mame", label="MaMe", family="mame", method=Merging(config))]
    results = benchmark(
        like_sdxl, tmp_path / "out", rows=rows, metrics=[METRICS["psnr"]], rounds=1
    ).run()
    assert [row.measured for row in results.rows] == [True, False, True]
    assert "largest level" in (results.rows[1].reason or "")
