"""The networks behind the distances against their authors' code, their resizing against
clean-fid's, and the cache of features.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mame_sd.errors import UserError
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.metrics.frechet import frechet_distance
from mame_sd.eval.metrics.inception_score import inception_score
from mame_sd.eval.metrics.kid import kid_exact
from mame_sd.eval.networks.cache import FeatureCache
from mame_sd.eval.networks.efficientnet_lite import EfficientNetLite0
from mame_sd.eval.networks.extractors import (
    Extractor,
    effnet_lite0_extractor,
    inception_extractor,
    load_extractor,
    resize,
)
from mame_sd.eval.scoring.reference import open_reference
from mame_sd.eval.weights.files import file_sha256
from mame_sd.eval.weights.registry import REGISTRY
from tests.builders import seeded
from tests.record_oracles import TAPS

ORACLES = Path(__file__).parents[2] / "oracles"


@cache
def oracle(part: str) -> Any:
    return json.loads((ORACLES / "eval.json").read_text())[part]


@pytest.fixture(scope="module")
def inception_state() -> dict[str, Tensor]:
    return seeded.inception_weights(
        json.loads((ORACLES / "inception_convolutions.json").read_text())
    )


@pytest.fixture(scope="module")
def effnet_state() -> dict[str, Tensor]:
    return seeded.weights(
        {name: tuple(value.shape) for name, value in EfficientNetLite0().state_dict().items()}
    )


@pytest.fixture(scope="module")
def effnet(effnet_state: dict[str, Tensor]) -> Extractor:
    return effnet_lite0_extractor(effnet_state)


def same(found: Tensor, expected: list[list[float]]) -> bool:
    return np.allclose(found[:, TAPS].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_inception_is_torch_fidelitys(inception_state: dict[str, Tensor]) -> None:
    extractor = inception_extractor(inception_state)
    found = extractor([seeded.picture(f"inception {i}", 299, 299) for i in range(2)])
    assert same(found.features, oracle("inception")["features"])
    assert same(found.logits, oracle("inception")["logits"])
    assert (found.features.shape, found.logits.shape) == ((2, 2048), (2, 1008))
    assert (extractor.dims, extractor.resize) == (2048, "clean-fid bicubic 299")


def test_fid_kid_and_is_from_pictures_are_torch_fidelitys(
    inception_state: dict[str, Tensor],
) -> None:
    extractor = inception_extractor(inception_state)
    a, b = (extractor(seeded.inception_set(side)) for side in "ab")
    expected = oracle("whole_path")
    score = inception_score(a.logits, splits=2, seed=None)
    assert frechet_distance(a.features, b.features) == pytest.approx(
        expected["frechet_inception_distance"], rel=1e-4
    )
    assert kid_exact(a.features, b.features) == pytest.approx(
        expected["kernel_inception_distance_mean"], rel=1e-3
    )
    assert score.mean == pytest.approx(expected["inception_score_mean"], rel=1e-5)
    assert score.std == pytest.approx(expected["inception_score_std"], rel=1e-2)


@pytest.mark.parametrize("file", [source.file for source in REGISTRY["inception-fid"].sources])
def test_inceptions_published_files_work_from_weights_dir(
    file: str, tmp_path: Path, inception_state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(inception_state, tmp_path / file)
    with pytest.raises(UserError, match="with the sha256 6726825d"):
        load_extractor("inception", tmp_path, offline=True)
    entry = REGISTRY["inception-fid"]
    digest = file_sha256(tmp_path / file)
    trusted = replace(
        entry, sources=tuple(replace(source, sha256=digest) for source in entry.sources)
    )
    monkeypatch.setitem(REGISTRY, "inception-fid", trusted)
    extractor = load_extractor("inception", tmp_path, offline=True)
    assert extractor.weights_hash == inception_extractor(inception_state).weights_hash


def test_effnet_lite0_is_its_authors(effnet: Extractor) -> None:
    found = effnet([seeded.picture(f"effnet {i}", 224, 224) for i in range(2)])
    assert same(found.features, oracle("efficientnet_lite0")["seeded"]["features"])
    assert same(found.logits, oracle("efficientnet_lite0")["seeded"]["logits"])


def test_effnet_lite0_is_its_authors_on_the_published_weights() -> None:
    try:
        extractor = load_extractor("effnet-lite0", offline=True)
    except UserError as error:
        pytest.skip(str(error))
    found = extractor([seeded.picture(f"effnet {i}", 224, 224) for i in range(2)])
    assert same(found.features, oracle("efficientnet_lite0")["published"]["features"])
    assert same(found.logits, oracle("efficientnet_lite0")["published"]["logits"])


@pytest.mark.parametrize("side", [299, 50])
def test_resizing_is_clean_fids(side: int) -> None:
    found = resize(seeded.picture("resize", 90, 130), side)
    assert found.shape == (3, side, side)
    taps = found.permute(1, 2, 0)[::37, ::41].numpy()
    assert np.allclose(taps, oracle("resizing")[str(side)], rtol=1e-6, atol=1e-4)


def test_what_is_not_the_standard_network_is_never_called_fid() -> None:
    labels = {metric.label for metric in METRICS.values() if metric.extractor == "effnet-lite0"}
    assert {label.split()[0] for label in labels} == {
        "FD-EffNetLite0",
        "KID-EffNetLite0",
        "IS-EffNetLite0",
    }


def test_order_neighbours_files_and_sizes_do_not_matter(effnet: Extractor, tmp_path: Path) -> None:
    pictures = [seeded.picture(f"mixed {i}", 40 + 10 * i, 64) for i in range(5)]
    whole = effnet(pictures).features
    assert torch.equal(effnet(pictures[3:]).features, whole[3:])
    assert torch.equal(effnet(pictures[::-1]).features.flip(0), whole)
    for i, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"{i}.png")
    assert torch.equal(effnet([tmp_path / f"{i}.png" for i in range(5)]).features, whole)


def no_network(images: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError(f"{len(images)} images were looked at again")


def cached(effnet: Extractor, folder: Path, run: Any = no_network, **changes: Any) -> Extractor:
    facts = {
        "name": effnet.name,
        "side": 224,
        "dims": effnet.dims,
        "weights_hash": effnet.weights_hash,
    } | changes
    return Extractor(run=run, cache=FeatureCache(folder), **facts)


def test_features_are_kept_per_image(
    effnet: Extractor, effnet_state: dict[str, Tensor], tmp_path: Path
) -> None:
    pictures = [seeded.picture(f"cache {i}", 40, 40) for i in range(3)]
    first = effnet_lite0_extractor(effnet_state, cache=FeatureCache(tmp_path))(pictures[:2])
    again = cached(effnet, tmp_path)(pictures[:2])
    assert torch.equal(again.features, first.features)
    assert torch.equal(again.logits, first.logits)
    with pytest.raises(AssertionError, match="1 images were looked at again"):
        cached(effnet, tmp_path)(pictures)
    for changes in ({"weights_hash": "other"}, {"side": 299}):
        with pytest.raises(AssertionError, match="1 images"):
            cached(effnet, tmp_path, **changes)(pictures[:2])


@pytest.mark.parametrize("damage", [b"", b"nothing of the kind", None])
def test_a_damaged_file_of_the_cache_is_made_again(
    effnet: Extractor, effnet_state: dict[str, Tensor], tmp_path: Path, damage: bytes | None
) -> None:
    pictures = [seeded.picture("damage", 40, 40)]
    extractor = effnet_lite0_extractor(effnet_state, cache=FeatureCache(tmp_path))
    first = extractor(pictures)
    (path,) = tmp_path.rglob("*.*")
    path.write_bytes(path.read_bytes()[:100] if damage is None else damage)
    with pytest.raises(AssertionError, match="1 images"):
        cached(effnet, tmp_path)(pictures)
    assert torch.equal(extractor(pictures).features, first.features)
    assert torch.equal(cached(effnet, tmp_path)(pictures).features, first.features)


def test_the_cache_keeps_what_it_is_given(tmp_path: Path) -> None:
    store = FeatureCache(tmp_path / "not yet there")
    assert store.get(store.key("a", "b")) is None
    store.put(store.key("a", "b"), {"x": torch.arange(3.0)})
    found = store.get(store.key("a", "b"))
    assert found is not None
    assert torch.equal(found["x"], torch.arange(3.0))
    assert store.get(store.key("ab", "")) is None
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".safetensors"]


def test_wrong_images_are_refused(effnet: Extractor, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(UserError, match=r"a.png"):
        effnet([tmp_path / "a.png"])
    for wrong, why in (
        ([], "at least one image"),
        ([np.zeros((8, 8, 3), np.float32)], "got float32"),
        ([np.zeros((8, 8), np.uint8)], r"\[8, 8\]"),
    ):
        with pytest.raises(ValueError, match=why):
            effnet(wrong)
    with pytest.raises(ValueError, match="inception, effnet-lite0, got 'resnet'"):
        load_extractor("resnet")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_sees_what_the_cpu_sees(effnet: Extractor, effnet_state: dict[str, Tensor]) -> None:
    pictures = [seeded.picture(f"cuda {i}", 60, 60) for i in range(3)]
    torch.set_float32_matmul_precision("high")  # TF32, which logits would show
    try:
        found = effnet_lite0_extractor(effnet_state, device="cuda")(pictures)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    expected = effnet(pictures)
    assert torch.allclose(found.features, expected.features, atol=1e-4)
    assert torch.allclose(found.logits, expected.logits, atol=1e-4)


def test_the_documented_example_makes_statistics_that_reference_takes(
    tmp_path: Path, inception_state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    torch.save(inception_state, tmp_path / "net.pth")
    source = replace(
        REGISTRY["inception-fid"].sources[0],
        file="net.pth",
        sha256=file_sha256(tmp_path / "net.pth"),
    )
    monkeypatch.setitem(
        REGISTRY, "inception-fid", replace(REGISTRY["inception-fid"], sources=(source,))
    )
    monkeypatch.setenv("MAME_SD_WEIGHTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for i in range(3):
        Image.fromarray(seeded.picture(f"photo {i}", 60, 90)).save(f"photos/{i}.jpg")
    exec(compile(code, "docs/metrics.md", "exec"), {})
    reference = open_reference(Path("photos.npz"))
    assert reference.count == 3
    assert reference.statistics is not None
    assert reference.statistics.source == "Inception"
    assert len(list(Path("features").rglob("*.safetensors"))) == 3
