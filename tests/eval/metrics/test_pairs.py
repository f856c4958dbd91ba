"""PSNR, SSIM and LPIPS against other implementations and closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torchmetrics
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from mame_sd.errors import UserError
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.metrics.lpips import Lpips
from mame_sd.eval.metrics.psnr import object_mask, object_psnr, psnr
from mame_sd.eval.metrics.ssim import ssim
from mame_sd.eval.weights.files import read_state_dict
from mame_sd.eval.weights.load import load
from tests.builders import seeded
from tests.builders.metrics import generator, oracle, pictures


def noisy(images: Tensor, amount: float, seed: int = 1) -> Tensor:
    """`images` with noise that grows along the batch, so that no two pairs score alike."""
    steps = torch.linspace(amount / 2, amount, len(images))[:, None, None, None]
    return (images + steps * torch.randn(images.shape, generator=generator(seed))).clamp(0, 1)


def test_psnr_of_each_pair_is_scikit_images_and_the_closed_form() -> None:
    half = torch.full((3, 3, 4, 4), 0.5)
    off = half + torch.tensor([0.0, 0.1, 0.01])[:, None, None, None]
    assert psnr(half, off).tolist() == pytest.approx([float("inf"), 20, 40], abs=1e-4)
    a = pictures(4, 33, 50)
    b = noisy(a, 0.2)
    expected = [
        peak_signal_noise_ratio(x.double().numpy(), y.double().numpy(), data_range=1)
        for x, y in zip(a, b, strict=True)
    ]
    assert psnr(a, b).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [(11, 11), (37, 53)])
def test_ssim_is_scikit_images_inside_the_border(size: tuple[int, int]) -> None:
    a = pictures(3, *size)
    b = noisy(a, 0.3)
    options = {
        "gaussian_weights": True,
        "sigma": 1.5,
        "use_sample_covariance": False,
        "channel_axis": 0,
        "data_range": 1,
    }
    expected = [
        structural_similarity(x.double().numpy(), y.double().numpy(), **options)
        for x, y in zip(a, b, strict=True)
    ]
    assert ssim(a, b).tolist() == pytest.approx(expected, abs=1e-9)


def seeded_lpips() -> Lpips:
    shapes = oracle("lpips")["alex"]["shapes"]
    return Lpips(seeded.weights({name: tuple(shape) for name, shape in shapes.items()}))


def test_lpips_is_its_authors_on_seeded_weights() -> None:
    assert seeded_lpips()(*seeded.picture_pairs()).tolist() == pytest.approx(
        oracle("lpips")["alex"]["distances"], rel=1e-5
    )
    assert METRICS["lpips"].network == Lpips.name


def test_lpips_is_its_authors_on_the_published_weights() -> None:
    try:
        lpips = Lpips(load("lpips-alex", offline=True))
    except UserError as error:
        pytest.skip(str(error))
    assert lpips(*seeded.picture_pairs()).tolist() == pytest.approx(
        oracle("lpips")["alex"]["published"], rel=1e-4
    )
    # another package's copy of the authors' weights
    package = Path(torchmetrics.__file__).parent
    heads = read_state_dict(package / "functional" / "image" / "lpips_models" / "alex.pth")
    for index, head in enumerate(heads.values()):
        assert torch.equal(lpips.tensors[f"head{index}"], head.flatten())


def test_wrong_pairs_are_refused() -> None:
    a, lpips = pictures(2, 176, 176), seeded_lpips()
    for other, why in (
        (a[:1], "one shape"),
        (a * 255, "0 to 1"),
        (a / 0, "0 to 1"),
        (a.to(torch.uint8), "floats"),
    ):
        for metric in (psnr, ssim, lpips):
            with pytest.raises(ValueError, match=why):
                metric(a, other)
    for metric, height, message in (
        (ssim, 10, "at least 11 x 11 for SSIM, got 176 x 10"),
        (lpips, 31, "at least 32 x 32 for LPIPS, got 176 x 31"),
    ):
        with pytest.raises(ValueError, match=message):
            metric(a[..., :height, :], a[..., :height, :])


def test_psnr_of_the_object_looks_at_what_stands_out_of_the_ground() -> None:
    image = torch.full((1, 3, 64, 64), 0.4)
    image[:, :, :, ::8] = 0.5  # a striped ground
    image[:, :, 20:44, 20:44] = torch.tensor([0.9, 0.1, 0.1])[:, None, None]
    mask = object_mask(image)[0]
    assert mask[22:42, 22:42].all()
    assert mask.sum() == pytest.approx(24**2, rel=0.1)
    worse = image.clone()
    worse[:, :, 22:42, 22:42] += 0.1
    assert 0 < psnr(image, worse).item() - object_psnr(image, worse).item() < 15
    ground = image.clone()
    ground[:, :, :10] += 0.1
    assert object_psnr(image, ground).item() == math.inf
    plain = torch.full((1, 3, 32, 32), 0.4)
    assert object_psnr(plain, plain + 0.1).item() == pytest.approx(20, abs=1e-3)
