"""What a user installs: a clone with PyTorch only, the registry's files, the example workflow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pathspec import PathSpec

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / "comfyui" / "example_workflows").glob("*.json"))
# As ComfyUI loads a folder of custom_nodes, in a process where only PyTorch and the standard
# library can be imported.
LOAD = """
import importlib.util, sys
folder = sys.argv[1]

class Missing:
    def find_spec(self, name, path=None, target=None):
        absent = "diffusers transformers accelerate safetensors PIL typer rich".split()
        if name.partition(".")[0] in absent:
            raise ImportError(name + " is not installed")

sys.meta_path.insert(0, Missing())
path = list(sys.path)
name = folder.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
node = module.NODE_CLASS_MAPPINGS["MaMeModelPatch"]
import mame_sd, torch
assert mame_sd.__file__.startswith(folder) == (sys.argv[2] == "beside"), mame_sd.__file__
assert sys.path == path
plan = mame_sd.plan_tokens(torch.randn(1, 64, 8), tau=-1.0)
print(plan.tokens_kept, node.CATEGORY)
"""


def test_the_registry_gets_what_the_node_needs_and_little_else(tmp_path: Path) -> None:
    """Load what Comfy's tool uploads, tracked files without .comfyignore's, with PyTorch only."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rules = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    ignored = PathSpec.from_lines("gitwildmatch", rules)
    folder = tmp_path / "custom_nodes" / "mame-sd.git"
    for name in listed.stdout.splitlines():
        if not ignored.match_file(name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 2_000_000
    expected = {"__init__.py", "comfyui", "mame_sd", "pyproject.toml", "README.md", "LICENSE"}
    assert {path.name for path in folder.iterdir()} == expected
    command = [sys.executable, "-c", LOAD, str(folder), "beside"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["32", "model/patch"]


def test_the_folder_alone_says_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "comfyui"
    shutil.copytree(ROOT / "comfyui", folder, ignore=shutil.ignore_patterns("__pycache__"))
    hide = "import sys, importlib.util as u; found = u.find_spec\n"
    hide += "u.find_spec = lambda name, *rest: None if name == 'mame_sd' else found(name, *rest)\n"
    command = [sys.executable, "-c", hide + LOAD, str(folder), "installed"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ImportError: MaMe token merging: expected the folder mame_sd next to" in done.stderr
    assert "git clone the whole repository into custom_nodes" in done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_example_workflow_has_todays_inputs(node: Any, path: Path) -> None:
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    ours = next(one for one in nodes if one["type"] == "MaMeModelPatch")
    every = node.INPUT_TYPES()
    inputs = {
        key: value
        for key, value in {**every["required"], **every["optional"]}.items()
        if key != "model"
    }
    expected = [
        options["default"] if "default" in options else kind[0] for kind, options in inputs.values()
    ]
    assert ours["widgets_values"] == expected
