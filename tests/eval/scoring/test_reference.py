"""Reference sets: what they are known by, and what lies in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from mame_sd.errors import UserError
from mame_sd.eval.scoring.reference import check_foreign, open_reference
from mame_sd.eval.scoring.runs import Run
from tests.builders.run_folders import write_run
from tests.builders.scored_runs import noise


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
    with pytest.raises(
        UserError, match=r"got 1 that are also in .*run \(x_0\); ask for fid_to_baseline"
    ):
        check_foreign(one, shared)
    check_foreign(None, shared)
