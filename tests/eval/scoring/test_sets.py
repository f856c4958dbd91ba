"""Set-wide scores: sample sizes, distances, and what a reference can serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mame_sd.errors import UserError
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.scoring import sets
from mame_sd.eval.scoring.reference import check_foreign, open_reference
from mame_sd.eval.scoring.runs import Run
from mame_sd.eval.scoring.sets import set_value, withheld
from mame_sd.eval.scoring.tools import Tools
from tests.builders.metrics import noise
from tests.builders.run_folders import write_run


class MeanColourStandIn:
    """Stands in for an extractor: an image's mean colour and spread, and its colour as logits."""

    name, weights_hash, resize = "stand-in", "0", "none"

    def __call__(self, images: list[np.ndarray]) -> Any:
        colour = torch.tensor(np.stack([image.mean((0, 1)) / 255 for image in images])).float()
        spread = torch.tensor([[image.std() / 255] for image in images]).float()
        return type(
            "Features", (), {"features": torch.cat([colour, spread], 1), "logits": colour * 20}
        )


def tools_with_stand_ins() -> Tools:
    stand_in = MeanColourStandIn()
    return Tools(networks={"inception-fid": stand_in, "dinov2-saliency": stand_in})


def coloured(count: int, brighter: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(brighter)
    return {
        f"{i:03}_0": np.clip(rng.normal(90 + brighter, 30, (8, 8, 3)), 0, 255).astype(np.uint8)
        for i in range(count)
    }


def test_distances_follow_the_sets_and_state_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = (Run.open(write_run(tmp_path / str(by), coloured(120, by))) for by in (5, 60))
    base = Run.open(write_run(tmp_path / "base", coloured(120, 0)))
    reference = open_reference(tmp_path / "base")
    assert (reference.name, len(reference.files)) == ("base", 120)
    tools = tools_with_stand_ins()
    for name in ("fid", "fd_dinov2", "kid", "kid_dinov2"):
        values = [set_value(METRICS[name], run, reference, tools) for run in (base, near, far)]
        assert abs(values[0].mean) < values[1].mean
        assert values[1].mean < values[2].mean
        assert values[2].n == 120
    assert "N = 120, below 2,048" in set_value(METRICS["fid"], near, reference, tools).warning
    few = replace(reference, files=reference.files[:119])
    assert "N = 119, below 2,048" in set_value(METRICS["fid"], near, few, tools).warning
    score = set_value(METRICS["is"], near, None, tools)
    assert (score.splits, score.n) == (1, 120)
    assert 1 <= score.mean <= score.cap
    monkeypatch.setattr(sets, "SPLIT_FROM", 120)
    score = set_value(METRICS["is"], near, None, tools)
    assert (score.splits, score.cap, score.std > 0) == (10, 12, True)


@pytest.mark.parametrize("count", [99, 100])
def test_what_images_and_references_cannot_serve_is_withheld(tmp_path: Path, count: int) -> None:
    one = Run.open(write_run(tmp_path / "run", coloured(1, 0)))
    run = replace(one, items={f"{n}_0": one.items["000_0"] for n in range(count)})
    few = "N = 99, needs 100" if count < 100 else None
    reference = open_reference(tmp_path / "run")
    assert withheld(METRICS["fid"], run, reference) == (few or "reference of 1, needs 100")
    for name, reason in (
        ("fid", few or "no --reference to measure against"),
        ("is", few),
        ("psnr", None),
        ("ssim", "images of 8 x 8, needs 11 x 11"),
    ):
        assert withheld(METRICS[name], run, None) == reason


def test_the_reference_is_known_by_what_it_holds(tmp_path: Path) -> None:
    for name, order in (("one", 1), ("other", -1)):
        (tmp_path / name).mkdir()
        for place, pixels in zip("ab", [noise(1), noise(2)][::order], strict=True):
            Image.fromarray(pixels).save(tmp_path / name / f"{place}.png")
    (tmp_path / "one" / "below").mkdir()
    Image.fromarray(noise(4)).save(tmp_path / "one" / "below" / "c.png")
    one, other = open_reference(tmp_path / "one"), open_reference(tmp_path / "other")
    assert one.digest == other.digest
    assert one.about() == {"name": "one", "n": 2, "sha256": one.digest}
    Image.fromarray(noise(3)).save(tmp_path / "other" / "b.png")
    assert open_reference(tmp_path / "other").digest != one.digest
    shared = Run.open(write_run(tmp_path / "run", {"x_0": noise(2), "y_0": noise(5)}))
    with pytest.raises(UserError, match=r"got 1 that are also in .*run \(x_0\); give other images"):
        check_foreign(one, shared)
    check_foreign(None, shared)
