"""The pictures: which cases are shown, difference maps, sizes, missing files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from mame_sd.eval.report import pictures, render
from mame_sd.eval.report.select import cases, focus
from mame_sd.eval.results.read import parse
from tests.builders.report_example import row
from tests.builders.report_page import Results


def test_cases_are_the_closest_the_median_and_the_furthest(results: Results) -> None:
    def picked() -> list[tuple[str, str]]:
        parsed = parse(results)
        return cases(parsed, focus(parsed))

    scores = row(results, "mame-default")["per_image"]["lpips"]
    ranked = sorted(scores, key=scores.__getitem__)
    assert picked() == [("best", ranked[0]), ("median", ranked[2]), ("worst", ranked[3])]
    for entry in results["rows"]:
        entry["values"].pop("lpips", None)  # PSNR takes its place, where higher is closer
    assert picked() == [("best", ranked[0]), ("median", ranked[2]), ("worst", ranked[3])]
    known = {picture["key"]: picture for picture in results["pictures"]}
    results["pictures"] = [known[key] for key in ranked[:2]]
    assert picked() == [("best", ranked[0]), ("worst", ranked[1])]
    results["pictures"] = [known[key] for key in ranked[:1]]
    assert picked() == [("only", ranked[0])]
    row(results, "mame-default")["per_image"] = {}
    assert picked() == [("", ranked[0])]


def test_difference_maps() -> None:
    one = Image.new("RGB", (4, 2), (10, 20, 30))
    other = Image.new("RGB", (4, 2), (10, 26, 33))
    values = pictures.difference(one, other)
    assert values.shape == (2, 4)
    assert np.unique(values).tolist() == [3.0]
    black, bright = (
        np.asarray(pictures.difference_map(np.full((1, 1), level), 8))[0, 0] for level in (0.0, 8.0)
    )
    assert black.sum() < 5
    assert bright.sum() > 600
    assert (np.asarray(pictures.difference_map(np.full((1, 1), 99.0), 8))[0, 0] == bright).all()


def test_embedded_images_are_bounded() -> None:
    noise = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    )
    flat = Image.new("RGB", (64, 64), (3, 2, 1))
    for limit in (20_000, 4_000):
        assert len(pictures.webp_uri(noise, limit)) <= limit * 4 / 3 + 60
    assert pictures.webp_uri(flat, 20_000).startswith("data:image/webp;base64,")
    most = 15 * pictures.LARGE_BYTES + pictures.GALLERY_IMAGES * pictures.THUMB_BYTES
    assert most * 4 / 3 < 7.5e6  # of twelve prompts; text and plots are well below the rest to 8 MB


def test_missing_and_broken_images_are_named_and_the_rest_is_shown(
    tmp_path: Path, unplotted: Results
) -> None:
    (tmp_path / "runs/mame-default/images/00001_0.png").unlink()
    (tmp_path / "runs/baseline/images/00002_0.png").write_bytes(b"\x89PNG\r\n")
    whole = (tmp_path / "runs/baseline/images/00003_0.png").read_bytes()
    (tmp_path / "runs/baseline/images/00003_0.png").write_bytes(whole[: len(whole) // 2])
    text = render(parse(unplotted), tmp_path).read_text(encoding="utf-8")
    for name in (
        "mame-default/images/00001_0.png",
        "baseline/images/00002_0.png",
        "baseline/images/00003_0.png",
    ):
        assert f"runs/{name}" in text
    assert text.count('class="shot"') > 10
