"""Rows of the instruments: each computes what its name says, and leaves the model as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import instruments as command
from mame_sd.core import restore
from mame_sd.diffusion import restoring
from mame_sd.eval.instruments import flow, measure, models, rows
from mame_sd.eval.instruments.models import Instrument, conditions, save_weights
from mame_sd.eval.instruments.rows import REFERENCE, ROWS, Row

from .test_instruments import tiny

MERGED = [name for name in ROWS if name not in (REFERENCE, "default")]


@pytest.fixture(scope="module")
def instrument() -> Instrument:
    return tiny("photographs")


@pytest.mark.parametrize("name", MERGED)
def test_a_row_changes_the_samples_and_leaves_the_model_as_it_was(
    name: str, instrument: Instrument
) -> None:
    given = conditions("photographs")[:1]
    unmerged = measure.samples_of(ROWS[REFERENCE], instrument, given, steps=3)
    samples = measure.samples_of(ROWS[name], instrument, given, steps=3)
    assert samples.shape == unmerged.shape
    assert torch.isfinite(samples).all()
    assert 5 < measure.decibels(samples, unmerged).item() < 120
    again = measure.samples_of(ROWS[REFERENCE], instrument, given, steps=3)
    assert torch.equal(again, unmerged)


def test_rivals_restore_by_the_nearest_chosen_token_and_by_the_mean() -> None:
    x = torch.randn(2, 64, 5, generator=torch.Generator().manual_seed(0))
    cells, count = restore.cells_and_count((8, 8), 0.25, 0, x.device)
    chosen = restore.choose_tokens(x, cells, count)
    places = chosen.take(torch.arange(64.0).expand(2, -1).unsqueeze(-1))  # [2, 16, 1]

    copied = rows.restoring_by(rows.copied)(x, cells, count).restore(places)[..., 0].long()
    distance = torch.cdist(x, chosen.take(x))
    nearest = places[..., 0].long().gather(1, distance.argmin(-1))
    assert torch.equal(copied, nearest)

    mean = rows.restoring_by(rows.averaged)(x, cells, count).restore(places)
    torch.testing.assert_close(mean, places.mean(1, keepdim=True).expand_as(mean))


def test_constants_of_the_fit_hold_for_the_block_alone(instrument: Instrument) -> None:
    before = restore.BANDWIDTH, restore.DRAWN, restoring.choose_tokens
    row = Row(label="", constants={"BANDWIDTH": 3.0, "DRAWN": 1.0}, weights=rows.copied)
    with row.on(instrument):
        assert (restore.BANDWIDTH, restore.DRAWN) == (3.0, 1.0)
        assert restoring.choose_tokens is not before[2]
    assert (restore.BANDWIDTH, restore.DRAWN, restoring.choose_tokens) == before
    assert {len(row.constants) for row in rows.constants_rows().values()} == {2}


def test_a_smaller_image_has_its_positions_over_the_whole_image(instrument: Instrument) -> None:
    embed = instrument.model.pos_embed
    own = embed.pos_embed.unflatten(1, (32, 32))
    with measure._positions(instrument, 24):
        small = embed.pos_embed.unflatten(1, (24, 24))
        assert small.shape[:3] == (1, 24, 24)
        corners = small[0, [0, 0, -1, -1], [0, -1, 0, -1]]
        torch.testing.assert_close(
            corners, own[0, [0, 0, -1, -1], [0, -1, 0, -1]], atol=0.35, rtol=0
        )
    assert torch.equal(embed.pos_embed.unflatten(1, (32, 32)), own)


def test_decibels_and_errors_are_those_of_a_known_difference() -> None:
    reference = torch.zeros(2, 3, 4, 4)
    samples = reference + torch.tensor([0.2, 0.02]).view(2, 1, 1, 1)
    torch.testing.assert_close(measure.decibels(samples, reference), torch.tensor([20.0, 40.0]))
    assert measure.velocity_errors([samples + 1], [samples + 1]) == [[0.0, 0.0]]
    assert measure.texture(samples).tolist() == [0, 0]


def test_the_command_prints_a_table_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instrument = tiny("photographs")
    monkeypatch.setitem(models.KINDS, "photographs", instrument.kind)
    save_weights("photographs", instrument.model.state_dict(), tmp_path)
    out = tmp_path / "found.jsonl"
    base = ["--weights", str(tmp_path), "--conditions", "2", "--batch", "1", "--steps", "2"]
    base += ["--guidance", "1", "--out", str(out)]
    command.main([*base, "--rows", "mlp-0.25"])
    (line,) = map(json.loads, out.read_text().splitlines())
    assert len(line["db"]["1"]) == 2
    assert [len(errors) for errors in line["error"]] == [2, 2, 2]
    capsys.readouterr()

    command.main([*base, "--rows", "mlp-0.25,fewer-1", "--seconds", "1"])
    shown = capsys.readouterr().out
    assert "mlp-0.25:" not in shown  # measured before
    head, _, unmerged, mlp, fewer = shown.splitlines()[-5:]
    assert head.endswith("| times as fast |")
    assert unmerged.startswith("| unmerged | inf |")
    assert mlp.startswith("| MLPs a quarter |")
    assert fewer.startswith("| one step fewer |")
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--rows", "mlp"], "expected names of unmerged, .*, got mlp"),
        (["--conditions", "200"], "expected 1 to 128 conditions"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(given)
    assert re.search(said, capsys.readouterr().err)


def test_without_weights_the_command_says_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*a clone of the repository has them"):
        command.main(["--weights", str(tmp_path)])


def test_the_velocity_of_an_unmerged_row_is_the_instruments(instrument: Instrument) -> None:
    given = conditions("photographs")[:1]
    clean = torch.zeros(1, *instrument.kind.shape)
    found = measure.velocities_of(ROWS[REFERENCE], instrument, clean, given)
    noisy, _ = flow.noised(clean, measure.TIMES[1], measure.NOISE)
    torch.testing.assert_close(found[1], flow.guided_velocity(instrument, noisy, 0.5, given))
