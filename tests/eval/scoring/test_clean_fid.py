"""FID and KID by clean-fid: how the package is called, and what is said where it can't be."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mame_sd.errors import MachineError, UserError
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.scoring import clean_fid
from mame_sd.eval.scoring.reference import open_reference
from mame_sd.eval.scoring.runs import Run
from mame_sd.eval.scoring.sets import set_value
from mame_sd.eval.scoring.tools import Tools
from tests.builders.run_folders import write_run
from tests.eval.scoring.test_sets import coloured


class RecordingStandIn:
    """Stands in for the package clean-fid, which needs torchvision: records its calls, and its
    distances are of means.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

    def get_files_features(self, paths: list[str], model: Any, **settings: Any) -> np.ndarray:
        self.calls.append((paths, settings))
        return np.arange(len(paths) * 2, dtype=float).reshape(-1, 2) + len(self.calls)

    def frechet_distance(
        self, mean: Any, covariance: Any, other: Any, other_covariance: Any
    ) -> float:
        assert covariance.shape == other_covariance.shape == (2, 2)
        return float(np.abs(mean - other).sum())

    def kernel_distance(self, a: Any, b: Any) -> float:
        return float(a.mean() - b.mean() + np.random.rand() * 0)  # noqa: NPY002


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> RecordingStandIn:
    stand_in = RecordingStandIn()
    module = ModuleType("cleanfid")
    module.fid = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cleanfid", module)
    return stand_in


def test_fid_and_kid_are_the_packages_own_and_lpips_is_not(
    tmp_path: Path, package: RecordingStandIn
) -> None:
    a, b = (write_run(tmp_path / name, coloured(100, k)) for k, name in enumerate("ab"))
    network = clean_fid.CleanFid(None, torch.device("cpu"), "clean-fid stand-in", "0")
    tools = Tools(fid_backend="clean-fid", networks={"clean-fid": network})
    run, reference = Run.open(b), open_reference(a)
    assert set_value(METRICS["fid"], run, None, reference, tools)["mean"] == 2.0
    assert set_value(METRICS["kid"], run, None, reference, tools)["mean"] == -1.0
    assert [len(paths) for paths, _ in package.calls] == [100, 100], "features are computed once"
    assert package.calls[0][1]["mode"] == "clean"
    assert set_value(METRICS["fid_to_baseline"], run, Run.open(a), None, tools)["mean"] == 4.0
    assert tools.about()["clean-fid"]["name"] == "clean-fid stand-in"
    assert not tools.by_clean_fid(METRICS["fd_effnet"])
    assert not Tools().by_clean_fid(METRICS["fid"])


def test_statistics_alone_are_refused_in_one_line(
    tmp_path: Path, package: RecordingStandIn
) -> None:
    run = Run.open(write_run(tmp_path / "a", coloured(100, 0)))
    np.savez(tmp_path / "r.npz", mu=np.zeros(2048), sigma=np.eye(2048), n=200)
    network = clean_fid.CleanFid(None, torch.device("cpu"), "clean-fid stand-in", "0")
    tools = Tools(fid_backend="clean-fid", networks={"clean-fid": network})
    with pytest.raises(UserError, match=r"r\.npz: expected a folder of images for clean-fid"):
        set_value(METRICS["fid"], run, None, open_reference(tmp_path / "r.npz"), tools)


def test_an_unknown_backend_names_the_known() -> None:
    with pytest.raises(UserError, match="expected mame-sd or clean-fid, got 'torch-fidelity'"):
        Tools(fid_backend="torch-fidelity")


def test_a_torchvision_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        UserError, match=r"expected the package clean-fid and a torchvision that fits torch"
    ) as caught:
        clean_fid.load_clean_fid(torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_a_missing_package_and_missing_weights_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    if importlib.util.find_spec("cleanfid") is None:
        with pytest.raises(UserError, match=r"pip install mame-sd\[clean-fid\]"):
            clean_fid.load_clean_fid(torch.device("cpu"))
    features = ModuleType("cleanfid.features")

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known")

    features.build_feature_extractor = unreachable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cleanfid", ModuleType("cleanfid"))
    monkeypatch.setitem(sys.modules, "cleanfid.features", features)
    monkeypatch.setattr(clean_fid, "_WEIGHTS", tmp_path / "none.pt")
    with pytest.raises(MachineError, match="Name or service not known"):
        clean_fid.load_clean_fid(torch.device("cpu"))
    with pytest.raises(UserError, match="got --offline"):
        clean_fid.load_clean_fid(torch.device("cpu"), offline=True)
