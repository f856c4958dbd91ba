"""Inception compared with its authors' code, resizing with clean-fid's, and the precision used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

from mame_sd.errors import UserError
from mame_sd.eval.cli import app as cli
from mame_sd.eval.metrics.frechet import frechet_distance
from mame_sd.eval.metrics.inception_score import inception_score
from mame_sd.eval.metrics.kernel import kernel_distance
from mame_sd.eval.networks import full_precision
from mame_sd.eval.networks.extractors import DinoV2, Inception, load_inception, resize
from mame_sd.eval.scoring import sets
from mame_sd.eval.weights.files import file_sha256
from mame_sd.eval.weights.registry import REGISTRY
from tests.builders import seeded
from tests.builders.metrics import ORACLES, oracle

TAPS = slice(None, None, 97)  # of a long vector, these are recorded


@pytest.fixture(scope="module")
def inception_state() -> dict[str, Tensor]:
    file = ORACLES.with_name("inception_convolutions.json")
    return seeded.inception_weights(json.loads(file.read_text()))


def same(found: Tensor, expected: list[list[float]]) -> bool:
    return np.allclose(found[:, TAPS].numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def published(
    tmp_path: Path, inception_state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a folder with weights that pass for the published ones."""
    entry = REGISTRY["inception-fid"]
    file = tmp_path / "weights" / entry.file
    file.parent.mkdir()
    torch.save(inception_state, file)
    with pytest.raises(UserError, match="with the sha256 6726825d"):
        load_inception(file.parent, offline=True)
    digest = file_sha256(file)
    monkeypatch.setitem(REGISTRY, "inception-fid", replace(entry, sha256=digest))
    return file.parent


def test_inception_is_torch_fidelitys_whatever_lies_beside(
    inception_state: dict[str, Tensor], published: Path, tmp_path: Path
) -> None:
    extractor = load_inception(published, offline=True)
    assert extractor.weights_hash == Inception(inception_state).weights_hash
    assert extractor.resize == "clean-fid bicubic 299"
    found = extractor([seeded.picture(f"inception {i}", 299, 299) for i in range(2)])
    assert same(found.features, oracle("inception")["features"])
    assert same(found.logits, oracle("inception")["logits"])
    assert (found.features.shape, found.logits.shape) == ((2, 2048), (2, 1008))
    small = [seeded.picture(f"mixed {i}", 40 + 10 * i, 64) for i in range(2)]
    for number, picture in enumerate(small):
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
    turned = extractor([tmp_path / "1.png", tmp_path / "0.png"]).features
    assert torch.equal(turned.flip(0), extractor(small).features), "order and neighbours"


def test_the_command_scores_where_the_weights_are_given(
    published: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FID, KID and the Inception score by the real network, on few images and seeded weights."""
    monkeypatch.setattr(sets, "MIN_IMAGES", 2)
    drawn = {
        name: [seeded.picture(f"{name} {i}", 20, 30) for i in range(2)] for name in ("a", "b", "c")
    }
    for name, pictures in drawn.items():
        (tmp_path / name).mkdir()
        for number, picture in enumerate(pictures):
            Image.fromarray(picture).save(tmp_path / name / f"{number}.png")
    line = ["score", str(tmp_path / "a"), str(tmp_path / "b"), "--reference", str(tmp_path / "c")]
    line += ["--metrics", "fid,kid,is", "--weights-dir", str(published)]
    assert cli.run([*line, "--offline", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    means = {name: value["mean"] for name, value in found["metrics"].items()}
    seen = {name: load_inception(published)(pictures) for name, pictures in drawn.items()}
    b = seen["b"]
    assert means == {
        "fid": pytest.approx(frechet_distance(b.features, seen["c"].features)),
        "kid": pytest.approx(1000 * kernel_distance(b.features, seen["c"].features)),
        "is": pytest.approx(inception_score(b.logits, 1)[0]),
    }
    network = found["manifest"]["networks"]["inception-fid"]
    assert (network["name"], network["resize"]) == ("Inception", "clean-fid bicubic 299")


@pytest.mark.parametrize("side", [299, 50])
def test_resizing_is_clean_fids(side: int) -> None:
    found = resize(seeded.picture("resize", 90, 130), side)
    assert found.shape == (3, side, side)
    taps = found.permute(1, 2, 0)[::37, ::41].numpy()
    assert np.allclose(taps, oracle("resizing")[str(side)], rtol=1e-6, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_sees_what_the_cpu_sees(inception_state: dict[str, Tensor]) -> None:
    pictures = [seeded.picture(f"cuda {i}", 60, 60) for i in range(3)]
    torch.set_float32_matmul_precision("high")  # TF32, which logits would show
    try:
        found = Inception(inception_state, "cuda")(pictures)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    expected = Inception(inception_state)(pictures)
    assert torch.allclose(found.features, expected.features, atol=1e-4)
    assert torch.allclose(found.logits, expected.logits, atol=1e-4)


BACKENDS = torch.backends
PLACES = (
    BACKENDS.cuda.matmul,
    BACKENDS.cudnn.conv,
    BACKENDS.mkldnn.matmul,
    BACKENDS.mkldnn.conv,
)


def allowed() -> list[Any]:
    """Return what the user has allowed."""
    found = [place.fp32_precision for place in (*PLACES, BACKENDS.cudnn.rnn)]
    return [*found, BACKENDS.cudnn.deterministic, BACKENDS.cudnn.benchmark]


USERS_CHOICES: dict[str, Callable[[], None]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "everything": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "benchmark": lambda: setattr(BACKENDS.cudnn, "benchmark", True),
}


@pytest.mark.parametrize("choice", USERS_CHOICES)
def test_networks_run_in_whole_precision_whatever_the_user_allows(choice: str) -> None:
    places = (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
    at_first = [place.fp32_precision for place in places]
    try:
        USERS_CHOICES[choice]()
        before = allowed()
        with full_precision():
            assert [place.fp32_precision for place in PLACES] == ["ieee"] * 4
            assert (BACKENDS.cudnn.deterministic, BACKENDS.cudnn.benchmark) == (True, False)
            assert not torch.is_grad_enabled()
        assert allowed() == before
    finally:
        BACKENDS.fp32_precision = "none"
        BACKENDS.cudnn.benchmark = False
        torch.set_float32_matmul_precision("highest")
        for place, value in zip(places, at_first, strict=True):
            place.fp32_precision = value


def test_dinov2_sees_what_transformers_processor_gives_it() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Dinov2Model(Dinov2Config(image_size=224, patch_size=56, **sizes)).eval()
    picture = np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)
    found = DinoV2(model)([picture, picture[::-1].copy()])
    assert found.features.shape == (2, 32)
    assert found.logits.shape == (2, 0)
    processor = BitImageProcessor(do_resize=False, do_center_crop=False,
                                  image_mean=[0.485, 0.456, 0.406],
                                  image_std=[0.229, 0.224, 0.225])  # fmt: skip
    pixels = processor(Image.fromarray(picture), return_tensors="pt").pixel_values
    with torch.no_grad():
        wanted = model(pixels).last_hidden_state[:, 0]
    assert torch.allclose(found.features[:1], wanted, atol=1e-4)
