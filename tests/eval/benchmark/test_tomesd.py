"""tomesd as a method of a run: it merges, leaves no trace, and says where it can do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mame_sd.errors import UserError
from mame_sd.eval.benchmark.tomesd import ToMeSD
from mame_sd.runs.generate import generate
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.methods import NotApplicable
from mame_sd.runs.model_files import ModelChoice
from tests.builders.benchmarks import LIKE_SDXL, PROMPTS, SETTINGS, rivals
from tests.builders.kills import snapshot
from tests.builders.tiny import save_tiny_pipeline


@rivals
def test_tomesd_merges_leaves_no_trace_and_resumes_to_the_same_pixels(
    model: LoadedModel, tmp_path: Path
) -> None:
    prompts = PROMPTS[:2]
    generate(model, prompts, SETTINGS, None, tmp_path / "before")
    summary = generate(model, prompts, SETTINGS, ToMeSD(0.5), tmp_path / "tomesd")
    level = {"level": 0, "tokens_in": 256, "tokens_kept": 128, "share": 0.5}
    assert summary.levels[0] == level
    assert summary.levels[1]["share"] == 1
    generate(model, prompts, SETTINGS, None, tmp_path / "after")
    assert snapshot(tmp_path / "before") == snapshot(tmp_path / "after")
    assert not any(hasattr(module, "_tome_info") for module in model.pipe.unet.modules())
    whole = snapshot(tmp_path / "tomesd")
    assert whole != snapshot(tmp_path / "before")
    (tmp_path / "tomesd" / "images" / "p00002_0.png").unlink()
    torch.manual_seed(99)
    assert generate(model, prompts, SETTINGS, ToMeSD(0.5), tmp_path / "tomesd").made == 1
    assert snapshot(tmp_path / "tomesd") == whole
    with pytest.raises(UserError, match=r"rival.ratio: 0.5 there, 0.25 here"):
        generate(model, prompts, SETTINGS, ToMeSD(0.25), tmp_path / "tomesd")


@rivals
def test_tomesd_says_where_it_can_do_nothing(tmp_path: Path) -> None:
    folder = save_tiny_pipeline(tmp_path / "like-sdxl", **LIKE_SDXL)
    like_sdxl = load_model(ModelChoice(model=str(folder), device="cpu"))
    with pytest.raises(NotApplicable, match="only at the largest level"):
        generate(like_sdxl, PROMPTS[:1], SETTINGS, ToMeSD(0.5), tmp_path / "run")
