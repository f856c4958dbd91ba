"""The instruments' sampler, conditions and weight files, on tiny models without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd import MaMeConfig, apply_mame
from mame_sd.errors import UserError
from mame_sd.eval.benchmark.rows import chosen_rows
from mame_sd.eval.benchmark.samples import LARGEST, decibels
from mame_sd.eval.instruments import flow, models
from mame_sd.eval.instruments.models import KINDS, Instrument, Kind, conditions
from scripts.training import instruments as training

NAMES = sorted(KINDS)


def tiny(name: str) -> Instrument:
    """Return an instrument of one head and two blocks whose layers all have random weights."""
    torch.manual_seed(0)
    instrument = Instrument(replace(KINDS[name], heads=1, blocks=2)).eval().requires_grad_(False)
    for parameter in instrument.parameters():
        if not parameter.any():
            parameter.normal_(0, 0.02)
    return instrument


class Straight(Instrument):
    """The exact flow to one known sample: the velocity at x is (x - clean) / t."""

    def __init__(self, kind: Kind, clean: Tensor) -> None:
        super().__init__(kind)
        self.clean = clean

    def forward(self, noisy: Tensor, time: Tensor, thumbnails: Tensor, known: Tensor) -> Tensor:
        return (noisy - self.clean) / time.view(-1, *[1] * (noisy.ndim - 1))


@pytest.mark.parametrize("steps", [1, 3])
def test_euler_follows_a_straight_flow_to_its_end(steps: int) -> None:
    kind = replace(KINDS["photographs"], heads=1, blocks=1)
    clean = torch.rand(3, 64, 64) * 2 - 1
    got = flow.sample(Straight(kind, clean), conditions(kind.name)[:2], steps)
    torch.testing.assert_close(got, clean.expand(2, -1, -1, -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_samples_have_their_own_noise_and_do_not_depend_on_the_batch(name: str) -> None:
    instrument, given = tiny(name), conditions(name)[:2]
    both = flow.sample(instrument, given, 2, guidance=2.0, seed=5)
    assert both.shape == (2, *instrument.kind.shape)
    second = flow.sample(instrument, given[1:], 2, guidance=2.0, seed=6)
    torch.testing.assert_close(both[1:], second, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_guidance_moves_away_from_the_velocity_without_a_condition(name: str) -> None:
    instrument, given = tiny(name), conditions(name)[:2]
    noisy = flow.noise_of(instrument.kind.shape, 2, 0)
    time = torch.full((2,), 0.5)
    with torch.no_grad():
        known = instrument(noisy, time, given, torch.ones(2))
        unknown = instrument(noisy, time, given, torch.zeros(2))
        guided = flow.guided_velocity(instrument, noisy, 0.5, given, 3.0)
        plain = flow.guided_velocity(instrument, noisy, 0.5, given)
    assert (known - unknown).abs().max() > 1e-4
    torch.testing.assert_close(guided, 3 * known - 2 * unknown, atol=1e-4, rtol=0)
    torch.testing.assert_close(plain, known)


def test_a_window_of_a_clip_is_given_the_part_of_its_place() -> None:
    instrument, given = tiny("video"), torch.rand(1, 2, 3, 8, 8)
    seen: list[Tensor] = []
    instrument.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    noisy = torch.randn(1, 3, 8, 16, 16)
    velocity = instrument(noisy, torch.ones(1), given, torch.ones(1), corner=(4, 10))
    assert velocity.shape == noisy.shape
    assert torch.equal(seen[0][:, :3], noisy)
    assert torch.equal(seen[0][:, 3:], instrument.known_frames(given)[..., 4:20, 10:26])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Instrument:
    """Make a tiny photographs instrument the one that is loaded, with weights in several files."""
    instrument = tiny("photographs")
    monkeypatch.setitem(models.KINDS, "photographs", instrument.kind)
    monkeypatch.setattr(training, "FILE_BYTES", 120_000)
    return instrument


def test_weights_come_back_from_several_files(small: Instrument, tmp_path: Path) -> None:
    files = training.save_weights("photographs", small.model.state_dict(), tmp_path)
    assert len(files) > 1
    assert max(file.stat().st_size for file in files) < 150_000
    loaded = models.load_instrument("photographs", tmp_path)
    for name, value in small.model.state_dict().items():
        step = value.abs().amax(-1, keepdim=True) / 127  # of each row's int8
        allowed = 0.51 * step if value.ndim == 2 else 0.001 * value.abs() + 1e-7
        assert ((loaded.model.state_dict()[name] - value).abs() <= allowed).all(), name


def test_what_cannot_be_loaded_is_one_sentence(small: Instrument, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected an instrument of photographs, video, got 'x'"):
        models.load_instrument("x", tmp_path)
    missing = r"expected photographs-1-of-N\.safetensors in .*, got no .*eval/instruments/weights"
    with pytest.raises(UserError, match=missing):
        models.load_instrument("photographs", tmp_path)
    files = training.save_weights("photographs", small.model.state_dict(), tmp_path)
    files[1].unlink()
    with pytest.raises(UserError, match=rf"expected {len(files)} files .*got no {files[1].name}"):
        models.load_instrument("photographs", tmp_path)
    for file in files:
        file.unlink(missing_ok=True)
    training.save_weights("photographs", {"other": torch.zeros(3)}, tmp_path)
    with pytest.raises(UserError, match=r"got those of another model"):
        models.load_instrument("photographs", tmp_path)


def test_the_trained_transformer_of_clips_follows_its_condition_and_tells_methods_apart() -> None:
    instrument, given = models.load_instrument("video"), conditions("video")[:2]
    clip = flow.sample(instrument, given[:1], 1)
    own, other = (F.mse_loss(training.thumbnails_of(clip)[0], thumbnails) for thumbnails in given)
    assert own < other / 10
    (mean,) = chosen_rows("mean-attention")[1:]
    with mean.method.on(instrument.model):
        without_attention = flow.sample(instrument, given[:1], 1)
    handle = apply_mame(instrument.model, MaMeConfig(keep=1, mlp_keep=0.25))
    restored = flow.sample(instrument, given[:1], 1)
    handle.remove()
    assert decibels(without_attention, clip) + 8 < decibels(restored, clip) < LARGEST
