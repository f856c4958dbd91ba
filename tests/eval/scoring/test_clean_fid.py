"""FID by the package clean-fid: how it is called, and what is said where it can't be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mame_sd.eval.cli import app as cli
from mame_sd.eval.scoring import clean_fid
from mame_sd.eval.weights.files import file_sha256
from tests.builders.console import error_of
from tests.builders.metrics import noise


class StandIn:
    """Stands in for the package clean-fid: features are first pixels, distances those of means."""

    def check_download_inception(self, fpath: str) -> None:
        assert fpath == str(clean_fid._WEIGHTS.parent)

    def build_feature_extractor(self, mode: str, device: Any, use_dataparallel: bool) -> str:
        return f"Inception, {mode}"

    def get_files_features(self, paths: list[str], model: str, **settings: Any) -> np.ndarray:
        assert (model, settings["mode"]) == ("Inception, clean", "clean")
        return np.array([np.asarray(Image.open(path))[0, 0] for path in paths], float)

    def frechet_distance(self, mean: Any, sigma: Any, other: Any, other_sigma: Any) -> float:
        print("fid calculation produces singular product")
        return float(np.abs(mean - other).sum())


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    module: Any = ModuleType("cleanfid")
    module.fid = module.features = module.downloads_helper = stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "cleanfid", module)
    for part in ("fid", "features", "downloads_helper"):
        monkeypatch.setitem(sys.modules, f"cleanfid.{part}", stand_in)
    (tmp_path / "inception.pt").write_bytes(b"weights")
    (tmp_path / "inception.pt").chmod(0o644)
    monkeypatch.setattr(clean_fid, "_SHA256", file_sha256(tmp_path / "inception.pt"))
    monkeypatch.setattr(clean_fid, "_WEIGHTS", tmp_path / "inception.pt")
    monkeypatch.setattr(clean_fid, "version", lambda name: f"of {name}")
    return stand_in


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write three folders of 100 images."""
    place = tmp_path_factory.mktemp("images")
    for name, seed in (("a", 0), ("b", 100), ("photos", 200)):
        (place / name).mkdir()
        for number in range(100):
            Image.fromarray(noise(seed + number)).save(place / name / f"{number}.png")
    return [str(place / name) for name in ("a", "b", "photos")]


def arguments(folders: list[str], *more: str) -> list[str]:
    a, b, photos = folders
    metrics = ["--metrics", "fid", "--reference", photos]
    return ["score", a, b, *metrics, "--fid-backend", "clean-fid", *more]


def test_the_distance_is_the_packages_own(
    package: StandIn, folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments(folders, "--json")) == 0
    found = json.loads(capsys.readouterr().out)  # nothing that the package prints goes to stdout
    corners = [
        np.mean([np.asarray(Image.open(f))[0, 0].astype(float) for f in Path(folder).iterdir()], 0)
        for folder in folders
    ]
    value = found["metrics"]["fid"]
    assert value["mean"] == pytest.approx(np.abs(corners[1] - corners[2]).sum())
    assert value["n"] == 100
    assert value["warning"] == "N = 100, below 2,048: biased upward"
    network = found["manifest"]["networks"]["clean-fid"]
    assert network["weights_sha256"] == file_sha256(clean_fid._WEIGHTS)


def test_what_can_not_be_done_is_one_line_before_anything_is_computed(
    package: StandIn,
    folders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(status: int, asked: list[str]) -> str:
        assert cli.run(asked) == status
        return error_of(capsys, silent=True)

    def imaginary(*_: Any) -> float:
        raise ValueError("Imaginary component 0.1")

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known")

    unknown = refused(2, arguments(folders, "--fid-backend", "torch-fidelity"))
    assert "--fid-backend: expected mame-sd or clean-fid, got 'torch-fidelity'" in unknown
    weights = clean_fid._WEIGHTS.rename(tmp_path / "away")
    offline = refused(2, arguments(folders, "--offline"))
    assert f"expected its Inception at {clean_fid._WEIGHTS}, found none" in offline
    with monkeypatch.context() as patch:
        patch.setattr(package, "check_download_inception", unreachable)
        said = refused(1, arguments(folders))
        assert "Name or service not known; check the network" in said
        patch.setitem(sys.modules, "cleanfid.features", None)
        said = refused(2, arguments(folders))
        assert "expected the package clean-fid and a torchvision that fits torch" in said
        assert "pip install 'mame-sd[clean-fid]'" in said
    weights.rename(clean_fid._WEIGHTS)
    with monkeypatch.context() as patch:
        patch.setattr(package, "frechet_distance", imaginary)
        said = refused(2, arguments(folders))
        assert "clean-fid: Imaginary component 0.1; give more images" in said


def test_weights_that_others_put_there_are_not_loaded(
    package: StandIn,
    folders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("it can run anything")

    monkeypatch.setattr(package, "build_feature_extractor", loaded)
    weights = clean_fid._WEIGHTS
    weights.chmod(0o666)
    assert cli.run(arguments(folders)) == 2
    assert f"{weights} to be a file of yours that nobody else may write" in error_of(capsys)
    weights.chmod(0o644)
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    assert cli.run(arguments(folders)) == 2
    assert "nobody else may write, got another one; take it away" in error_of(capsys)
    weights.unlink()
    weights.write_bytes(b"another network")
    assert cli.run(arguments(folders)) == 2
    assert f"expected the published Inception at {weights} (sha256" in error_of(capsys)
