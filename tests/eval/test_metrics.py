"""Metrics against other people's implementations, on the same images, features and weights, and against closed forms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.metrics.clip import Clip, clip_image_cosine, clip_score, load_clip
from mame_sd.eval.metrics.frechet import Statistics, frechet_distance, load_statistics, save_statistics, statistics
from mame_sd.eval.metrics.inception_score import inception_score
from mame_sd.eval.metrics.kid import kid, kid_exact
from mame_sd.eval.metrics.lpips import Lpips, load_lpips
from mame_sd.eval.metrics.psnr import psnr
from mame_sd.eval.metrics.ssim import ms_ssim, ssim
from mame_sd.eval.networks import full_precision
from mame_sd.eval.scoring.runs import Run
from mame_sd.eval.scoring.score import cut_prompts
from mame_sd.eval.scoring.tools import Tools
from mame_sd.eval.weights.files import _torchmetrics_heads, file_sha256, read_state_dict
from mame_sd.eval.weights.registry import REGISTRY
from safetensors.torch import save_file
from torch import Tensor

from mame_sd.errors import UserError
from tests.builders import seeded
from tests.builders.run_folders import write_run
from tests.builders.tiny import save_tiny_clip

ORACLES = Path(__file__).parents[1] / "oracles" / "eval.json"


@cache
def oracle(part: str) -> Any:
    """What other people's code said, as `python -m tests.record_oracles` wrote it down."""
    return json.loads(ORACLES.read_text())[part]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth noise in [0, 1], [n, 3, height, width]: more like pictures than white noise is."""
    coarse = torch.rand(n, 3, max(2, height // 8), max(2, width // 8), generator=generator(seed))
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)


def noisy(images: Tensor, amount: float, seed: int = 1) -> Tensor:
    """`images` with noise that grows along the batch, so that no two pairs score alike."""
    steps = torch.linspace(amount / 2, amount, len(images))[:, None, None, None]
    return (images + steps * torch.randn(images.shape, generator=generator(seed))).clamp(0, 1)


def features(n: int, dims: int, seed: int, shift: float = 0.0) -> Tensor:
    mixing = torch.randn(dims, dims, generator=generator(7)) / dims**0.5
    return torch.randn(n, dims, generator=generator(seed)) @ mixing + shift


# PSNR, SSIM, MS-SSIM


def test_psnr_in_closed_form() -> None:
    a = torch.full((3, 3, 4, 4), 0.5)
    b = a + torch.tensor([0.0, 0.1, 0.01])[:, None, None, None]
    assert psnr(a, b).tolist() == pytest.approx([float("inf"), 20, 40], abs=1e-4)


def test_psnr_of_each_pair_is_scikit_images() -> None:
    from skimage.metrics import peak_signal_noise_ratio

    a = pictures(4, 33, 50)
    b = noisy(a, 0.2)
    expected = [
        peak_signal_noise_ratio(x.double().numpy(), y.double().numpy(), data_range=1) for x, y in zip(a, b, strict=True)
    ]
    assert psnr(a, b).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [(11, 11), (64, 64), (37, 53)])
def test_ssim_is_scikit_images_inside_the_border(size: tuple[int, int]) -> None:
    from skimage.metrics import structural_similarity

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
        structural_similarity(x.double().numpy(), y.double().numpy(), **options) for x, y in zip(a, b, strict=True)
    ]
    assert ssim(a, b).tolist() == pytest.approx(expected, abs=1e-9)


def test_ssim_is_torchmetrics_without_its_padded_border() -> None:
    from torchmetrics.functional.image.ssim import _ssim_update

    a = pictures(3, 40, 33)
    b = noisy(a, 0.3)
    _, full = _ssim_update(a.double(), b.double(), data_range=1.0, return_full_image=True)
    assert ssim(a, b).tolist() == pytest.approx(full[..., 5:-5, 5:-5].mean((1, 2, 3)).tolist(), abs=1e-9)


@pytest.mark.parametrize("size", [(176, 176), (176, 208)])
def test_ms_ssim_is_pytorch_msssims(size: tuple[int, int]) -> None:
    from pytorch_msssim import ms_ssim as theirs

    a = pictures(2, *size)
    b = noisy(a, 0.3)
    expected = theirs(a.double(), b.double(), data_range=1, size_average=False)
    assert ms_ssim(a, b).tolist() == pytest.approx(expected.tolist(), abs=1e-6)  # its window is rounded to float32


def test_a_picture_is_wholly_like_itself_and_its_negative_is_not() -> None:
    a = pictures(2, 176, 180)
    assert ssim(a, a).tolist() == pytest.approx([1, 1])
    assert ms_ssim(a, a).tolist() == pytest.approx([1, 1])
    assert (ssim(a, 1 - a) < 0.5).all()
    assert (ms_ssim(a, 1 - a) >= 0).all()


@pytest.mark.parametrize("metric", [psnr, ssim, ms_ssim])
def test_paired_metrics_refuse_wrong_pairs(metric) -> None:
    a = pictures(2, 176, 176)
    for other, why in (
        (a[:1], "one shape"),
        (a * 255, "0 to 1"),
        (a * 2 - 1, "0 to 1"),
        (a / 0, "0 to 1"),
        (a.to(torch.uint8), "floats"),
    ):
        with pytest.raises(ValueError, match=why):
            metric(a, other)


def test_small_images_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="at least 11 x 11 for SSIM, got 32 x 10"):
        ssim(torch.zeros(1, 3, 10, 32), torch.zeros(1, 3, 10, 32))
    with pytest.raises(ValueError, match="at least 176 x 176 for MS-SSIM, got 175 x 200"):
        ms_ssim(torch.zeros(1, 3, 200, 175), torch.zeros(1, 3, 200, 175))


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_neighbours_in_the_batch_change_nothing(metric) -> None:
    a = pictures(3, 40, 24)
    b = noisy(a, 0.2)
    alone = torch.cat([metric(a[i : i + 1], b[i : i + 1]) for i in range(3)])
    assert torch.equal(metric(a, b), alone)


# Frechet distance


@settings(deadline=None, max_examples=30)
@given(dims=st.integers(1, 12), seed=st.integers(0, 1000))
def test_frechet_of_commuting_gaussians_is_the_closed_form(dims: int, seed: int) -> None:
    rng = generator(seed)
    rotation = torch.linalg.qr(torch.randn(dims, dims, generator=rng, dtype=torch.float64)).Q
    spread_a, spread_b = torch.rand(2, dims, generator=rng, dtype=torch.float64)
    spread_a[0] = 0  # singular
    gap = torch.randn(dims, generator=rng, dtype=torch.float64)
    a = Statistics(torch.zeros(dims, dtype=torch.float64), spread_a[:, None] * rotation.T, 100)
    b = Statistics(gap, spread_b[:, None] * rotation.T, 100)
    expected = gap.square().sum() + (spread_a - spread_b).square().sum()
    assert frechet_distance(a, b) == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("n", "m", "dims"), [(400, 300, 16), (60, 500, 32), (2, 3, 5)])
def test_frechet_is_scipys_square_root(n: int, m: int, dims: int) -> None:
    from scipy.linalg import sqrtm

    a, b = features(n, dims, 1).double(), features(m, dims, 2, 0.3).double()
    cov_a, cov_b = np.cov(a.numpy(), rowvar=False), np.cov(b.numpy(), rowvar=False)
    gap = ((a.mean(0) - b.mean(0)) ** 2).sum().item()
    expected = gap + np.trace(cov_a) + np.trace(cov_b) - 2 * np.trace(sqrtm(cov_a @ cov_b).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-5 if n == 2 else 1e-9)


def test_frechet_is_torchmetrics() -> None:
    from torchmetrics.image.fid import _compute_fid

    first, second = statistics(features(200, 64, 1)), statistics(features(150, 64, 2, 0.1))
    theirs = _compute_fid(first.mean, first.covariance, second.mean, second.covariance)
    assert frechet_distance(first, second) == pytest.approx(theirs.item(), rel=1e-6)


def test_frechet_of_fewer_images_than_dims_and_of_their_covariances_agree() -> None:
    a, b = statistics(features(20, 50, 1)), statistics(features(30, 50, 2))
    full = [Statistics(s.mean, torch.linalg.cholesky(s.covariance + 1e-13 * torch.eye(50)).T, s.n) for s in (a, b)]
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(*full), rel=1e-4)


def test_frechet_laws() -> None:
    a, b = features(40, 8, 1), features(50, 8, 2, 1.0)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator(3))).Q
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-9)
    assert frechet_distance(a @ rotation + 5, b @ rotation + 5) == pytest.approx(frechet_distance(a, b), rel=1e-4)
    assert frechet_distance(a, a + 2) == pytest.approx(8 * 4, rel=1e-5)


def test_statistics_survive_their_file(tmp_path: Path) -> None:
    a, b = statistics(features(40, 8, 1), "Inception"), statistics(features(6, 8, 2), "Inception")
    save_statistics(tmp_path / "a.npz", a)
    again = load_statistics(tmp_path / "a.npz")
    assert (again.n, again.source) == (40, "Inception")
    assert frechet_distance(again, b) == pytest.approx(frechet_distance(a, b), rel=1e-9)
    with np.load(tmp_path / "a.npz") as file:
        assert np.allclose(file["sigma"], np.cov(features(40, 8, 1).double().numpy(), rowvar=False))


def test_a_published_statistics_file_needs_mu_and_sigma_only(tmp_path: Path) -> None:
    a = statistics(features(40, 8, 1))
    np.savez(tmp_path / "a.npz", mu=a.mean.float().numpy(), sigma=a.covariance.float().numpy())
    again = load_statistics(tmp_path / "a.npz")
    assert (again.n, again.source) == (0, "")
    assert frechet_distance(again, a) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"mu": np.zeros(3)}, "sigma"),
        ({"mu": np.zeros(3), "sigma": np.eye(4)}, r"mu is \[3\] and sigma \[4, 4\]"),
        ({"mu": np.zeros(3), "sigma": np.eye(3) * np.nan}, "NaN"),
        ({"mu": np.zeros(3), "sigma": -np.eye(3)}, "eigenvalue -1"),
        ({"mu": np.array([None] * 3), "sigma": np.eye(3)}, "allow_pickle"),
    ],
)
def test_bad_statistics_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], why: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=why):
        load_statistics(tmp_path / "a.npz")


def test_what_is_no_statistics_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("nothing of the kind")
    (tmp_path / "empty.npz").write_bytes(b"")
    for name in ("a.npz", "empty.npz", "none.npz"):
        with pytest.raises(UserError, match=name):
            load_statistics(tmp_path / name)


def test_frechet_refuses_what_it_cannot_compare() -> None:
    a = features(10, 4, 1)
    for other, why in (
        (a[:1], "at least 2 images"),
        (a / 0, "finite"),
        (features(10, 5, 1), "equal feature dims"),
    ):
        with pytest.raises(ValueError, match=why):
            frechet_distance(a, other)
    with pytest.raises(ValueError, match="one extractor, got Inception and EffNetLite0"):
        frechet_distance(statistics(a, "Inception"), statistics(a, "EffNetLite0"))


# KID


def test_kid_of_all_images_is_torchmetrics_and_the_sum_by_hand() -> None:
    from torchmetrics.image.kid import poly_mmd

    a, b = features(40, 16, 1).double(), features(40, 16, 2, 0.2).double()
    one, two, cross = ((x @ y.T / 16 + 1) ** 3 for x, y in ((a, a), (b, b), (a, b)))
    by_hand = (one.sum() - one.trace() + two.sum() - two.trace()) / (40 * 39) - 2 * cross.mean()
    assert kid_exact(a, b) == pytest.approx(by_hand.item(), rel=1e-9)
    assert kid_exact(a, b) == pytest.approx(poly_mmd(a, b).item(), rel=1e-9)
    everything = kid(a, b, subsets=3, subset_size=40)
    assert everything.mean == pytest.approx(kid_exact(a, b), rel=1e-9)
    assert (everything.std, everything.subsets, everything.subset_size) == (0, 1, 40)
    one_side = kid(a, b[:30], subsets=3, subset_size=1000)
    assert (one_side.subsets, one_side.subset_size) == (3, 30)


def test_kid_by_subsets_is_near_the_exact_one() -> None:
    a, b = features(300, 16, 1), features(250, 16, 2, 0.3)
    exact, drawn = kid_exact(a, b), kid(a, b, subsets=50, subset_size=100)
    assert (drawn.subsets, drawn.subset_size) == (50, 100)
    assert abs(drawn.mean - exact) < 4 * drawn.std / 50**0.5


def test_kid_in_chunks_is_kid_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = features(50, 8, 1), features(37, 8, 2)
    whole = kid_exact(a, b)
    monkeypatch.setattr("mame_sd.eval.metrics.kid._CHUNK", 7)
    assert kid_exact(a, b) == pytest.approx(whole, rel=1e-12)


def test_pairs_are_unbiased_only_without_their_cross_terms() -> None:
    """The mean over many draws of two same-prompt sets of ONE distribution must be 0; left in, cross terms pull it below."""
    with_cross, without = [], []
    for seed in range(200):
        a = features(20, 8, seed)
        b = a + 0.05 * torch.randn(a.shape, generator=generator(seed + 1000))
        with_cross.append(kid_exact(a, b))
        without.append(kid_exact(a, b, paired=True))
    assert max(with_cross) < 0
    spread = np.std(without) / len(without) ** 0.5
    assert abs(np.mean(without)) < 4 * spread + 0.01 * abs(np.mean(with_cross))


def test_kid_draws_from_its_own_generator() -> None:
    a, b = features(50, 8, 1), features(60, 8, 2)
    state = torch.get_rng_state()
    first = kid(a, b, subsets=5, subset_size=20, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    assert kid(a, b, subsets=5, subset_size=20, seed=3) == first
    assert kid(a, b, subsets=5, subset_size=20, seed=4) != first
    assert kid(a, b).subset_size == 50


def test_kid_refuses_what_it_cannot_compare() -> None:
    a = features(10, 4, 1)
    for other, why in ((a[:1], "at least 2"), (features(10, 5, 1), "at least 2"), (a * float("nan"), "finite")):
        with pytest.raises(ValueError, match=why):
            kid(a, other)
    with pytest.raises(ValueError, match="expected pairs, got 10 and 9"):
        kid_exact(a, a[:9], paired=True)
    with pytest.raises(ValueError, match="at least 1 subset of 2"):
        kid(a, a, subset_size=1)


# recorded from torch-fidelity and clean-fid


def test_distances_and_the_inception_score_are_torch_fidelitys_and_clean_fids() -> None:
    a, b = seeded.feature_sets()
    expected = oracle("distances")
    score = inception_score(4 * a, splits=3, seed=None)
    assert frechet_distance(a, b) == pytest.approx(expected["fid"], rel=1e-6)
    assert frechet_distance(a, b) == pytest.approx(expected["fid of clean-fid"], rel=1e-6)
    assert kid_exact(a, b) == pytest.approx(expected["kid"], rel=1e-6)
    assert kid_exact(a, b) == pytest.approx(expected["kid of clean-fid"], rel=1e-6)
    assert kid_exact(a, b, paired=True) == pytest.approx(expected["kid paired"], rel=1e-6)
    assert [score.mean, score.std] == pytest.approx(expected["isc"], rel=1e-6)


# Inception score


def test_inception_score_is_torchmetrics() -> None:
    from torchmetrics.image.inception import InceptionScore

    logits = 5 * seeded.uniform("logits", (40, 12))
    metric = InceptionScore(feature=torch.nn.Identity(), splits=1)
    metric.update(logits)
    assert inception_score(logits, splits=1).mean == pytest.approx(metric.compute()[0].item(), rel=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_sure_and_even_answers_score_the_number_of_classes_up_to_the_cap(splits: int) -> None:
    logits = 1000 * torch.eye(10).repeat(4, 1)
    score = inception_score(logits, splits, seed=None)
    assert (score.n, score.splits, score.cap) == (40, splits, 40 / splits)
    assert score.mean == pytest.approx(min(10, score.cap))
    assert score.std == pytest.approx(0, abs=1e-9)
    assert inception_score(torch.zeros(40, 10)).mean == pytest.approx(1)


def test_inception_score_draws_from_its_own_generator_and_refuses_nan() -> None:
    logits = 5 * seeded.uniform("logits", (40, 12))
    state = torch.get_rng_state()
    assert inception_score(logits) == inception_score(logits)
    assert inception_score(logits, seed=1) != inception_score(logits, seed=2)
    assert torch.equal(state, torch.get_rng_state())
    for wrong, why in ((logits[:9], "at least 10 images"), (logits / 0, "finite"), (logits[0], "logits")):
        with pytest.raises(ValueError, match=why):
            inception_score(wrong)


# whole precision


def precisions() -> list[Any]:
    """What the user has allowed, by the new settings and, where it does not contradict these, by the old one."""
    backends = torch.backends
    places = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    )
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:
        old = "contradicts"
    return [*(place.fp32_precision for place in places), backends.cudnn.deterministic, backends.cudnn.benchmark, old]


USERS_CHOICES: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "convolutions alone": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}


@pytest.fixture
def own_precisions() -> Iterator[None]:
    """What the test allows is taken back."""
    places = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    yield
    torch.backends.fp32_precision = "none"
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    for place, value in zip(places, before, strict=True):
        place.fp32_precision = value


@pytest.mark.usefixtures("own_precisions")
@pytest.mark.parametrize("choice", USERS_CHOICES)
def test_networks_run_in_whole_precision_whatever_the_user_allows(choice: str) -> None:
    backends = torch.backends
    USERS_CHOICES[choice]()
    before = precisions()
    with full_precision():
        places = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
        assert [place.fp32_precision for place in places] == ["ieee"] * 4
        assert (backends.cudnn.deterministic, backends.cudnn.benchmark) == (True, False)
        assert not torch.is_grad_enabled()
        assert torch.isfinite(
            torch.nn.functional.conv2d(torch.ones(1, 3, 8, 8), torch.ones(2, 3, 3, 3)) @ torch.ones(6, 2)
        ).all()
    assert precisions() == before


# LPIPS


def seeded_lpips(net: str) -> Lpips:
    return Lpips(net, seeded.weights({name: tuple(shape) for name, shape in oracle("lpips")[net]["shapes"].items()}))


@pytest.mark.parametrize("net", ["alex", "vgg", "squeeze"])
def test_lpips_is_its_authors_on_seeded_weights(net: str) -> None:
    assert seeded_lpips(net)(*seeded.picture_pairs()).tolist() == pytest.approx(
        oracle("lpips")[net]["distances"], rel=1e-5
    )


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_lpips_is_its_authors_on_the_published_weights(net: str) -> None:
    try:
        lpips = load_lpips(net, offline=True)
    except UserError as error:
        pytest.skip(str(error))
    assert lpips(*seeded.picture_pairs()).tolist() == pytest.approx(oracle("lpips")[net]["published"], rel=1e-4)
    heads = read_state_dict(_torchmetrics_heads(net))  # another package's copy of the authors' weights
    for index, head in enumerate(heads.values()):
        assert torch.equal(lpips.tensors[f"head{index}"], head.flatten())


def test_lpips_laws() -> None:
    lpips = seeded_lpips("alex")
    a, b = seeded.picture_pairs()
    assert lpips(a, a).tolist() == [0, 0]
    assert lpips(a, b).tolist() == pytest.approx(lpips(b, a).tolist(), rel=1e-5)
    assert lpips(a[1:], b[1:]).tolist() == pytest.approx(lpips(a, b)[1:].tolist(), rel=1e-5)
    assert lpips.name == "lpips-alex"
    assert len(lpips.weights_hash) == 64


def test_lpips_refuses_wrong_ranges_sizes_and_nets() -> None:
    lpips = seeded_lpips("alex")
    a, b = seeded.picture_pairs()
    for other, why in ((2 * b - 1, "0 to 1"), (b * 255, "0 to 1"), (b[:1], "one shape")):
        with pytest.raises(ValueError, match=why):
            lpips(a, other)
    with pytest.raises(ValueError, match="at least 32 x 32 for LPIPS, got 86 x 31"):
        lpips(a[..., :31, :], b[..., :31, :])
    with pytest.raises(ValueError, match="LPIPS net of alex, vgg, squeeze, got 'resnet'"):
        Lpips("resnet", {})


# CLIP


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("weights") / "clip-vit-base-patch32")


@pytest.fixture(scope="module")
def clip(clip_folder: Path) -> Clip:
    return load_clip(clip_folder)


PROMPTS = ["a red key on a table", "an owl"]


def test_clip_score_is_the_models_own_logit_without_its_scale(clip: Clip, clip_folder: Path) -> None:
    from PIL import Image
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    model = CLIPModel.from_pretrained(clip_folder).eval()
    pictures = [seeded.picture(f"clip {i}", 50, 70) for i in range(2)]
    pixels = CLIPImageProcessorPil.from_pretrained(clip_folder)(
        [Image.fromarray(x) for x in pictures], return_tensors="pt"
    )
    tokens = CLIPTokenizer.from_pretrained(clip_folder)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = (model(**tokens, **pixels).logits_per_image / model.logit_scale.exp()).diagonal() * 100
    images = torch.stack([torch.from_numpy(x).permute(2, 0, 1).float() / 255 for x in pictures])
    result = clip_score(clip, images, PROMPTS)
    assert result.scores.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert result.cut == 0


def test_long_prompts_are_cut_counted_and_still_differ(clip: Clip) -> None:
    image = pictures(1, 40, 40).expand(3, 3, 40, 40)
    same_start = "a" * 76  # one token a character, so the last of them is cut
    result = clip_score(clip, image, [same_start + "b", same_start + "c", "b" * 80])
    assert result.cut == 3
    assert result.scores[0] == pytest.approx(result.scores[1].item(), abs=1e-9)
    assert abs(result.scores[0] - result.scores[2]) > 1e-3
    assert clip_score(clip, image[:1], ["a" * 75]).cut == 0


def test_cut_prompts_are_counted_once_and_also_when_nothing_is_scored_again(clip: Clip, tmp_path: Path) -> None:
    images = {f"{key}_{repeat}": seeded.picture(f"cut {key}", 40, 40) for key in "abc" for repeat in (0, 1)}
    prompts = {key: "a" * 80 if key < "c" else "an owl" for key in images}  # a and b: one text under two ids
    run = Run.open(write_run(tmp_path / "run", images, prompts))
    tools = Tools(networks={"clip": clip})
    assert cut_prompts([METRICS["clip_score"]], run, tools) == (1, 2)
    assert cut_prompts([METRICS["clip_image"]], run, tools) == (0, 2)
    assert cut_prompts([METRICS["clip_score"]], run, Tools(networks={"clip": UserError("no weights")})) == (0, 2)


def test_clip_image_cosine_laws(clip: Clip) -> None:
    a, b = seeded.picture_pairs()
    assert clip_image_cosine(clip, a, a).tolist() == pytest.approx([1, 1], abs=1e-9)
    assert clip_image_cosine(clip, a, b).tolist() == pytest.approx(clip_image_cosine(clip, b, a).tolist(), abs=1e-9)
    assert (clip_image_cosine(clip, a, b) < 0.9999).all()


def test_clip_refuses_wrong_numbers_and_ranges(clip: Clip) -> None:
    a, b = seeded.picture_pairs()
    with pytest.raises(ValueError, match="got 1 prompts and 2 images"):
        clip_score(clip, a, PROMPTS[:1])
    with pytest.raises(ValueError, match="0 to 1"):
        clip_score(clip, a * 255, PROMPTS)
    with pytest.raises(ValueError, match="one shape"):
        clip_image_cosine(clip, a, b[:1])


def test_clip_comes_from_weights_dir_checked(
    clip: Clip, clip_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = REGISTRY["clip-vit-b-32"]
    (source,) = entry.sources
    assert source.file == "clip-vit-base-patch32/pytorch_model.bin"
    with pytest.raises(UserError, match="with the sha256 a63082132ba4"):
        load_clip("clip-vit-b-32", weights_dir=clip_folder.parent, offline=True)
    trusted = replace(source, sha256=file_sha256(clip_folder / "pytorch_model.bin"))
    monkeypatch.setitem(REGISTRY, "clip-vit-b-32", replace(entry, sources=(trusted,)))
    loaded = load_clip("clip-vit-b-32", weights_dir=clip_folder.parent, offline=True)
    assert (loaded.name, loaded.weights_hash) == ("CLIP clip-vit-b-32", clip.weights_hash)
    both = tmp_path / clip_folder.name
    shutil.copytree(clip_folder, both)
    save_file({name: value + 1 for name, value in clip.model.state_dict().items()}, both / "model.safetensors")
    loaded = load_clip("clip-vit-b-32", weights_dir=tmp_path, offline=True)
    assert loaded.weights_hash == clip.weights_hash, "what was checked is what is read"


def test_a_folder_that_is_no_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a CLIP model, its tokenizer and preprocessor_config.json in "):
        load_clip(tmp_path)
