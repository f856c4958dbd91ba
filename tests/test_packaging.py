"""Names of the package, and the wheel, which holds all that a user needs and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import mame_sd
from mame_sd.embedded.model import embedded_models
from scripts.release import set_links

ROOT = Path(__file__).parents[1]
# What the installed wheel is asked, in one process: another would load all libraries again.
INSTALLED = """
import os, sys
import mame_sd
from mame_sd.cli import app
from mame_sd.embedded.model import models_folder
from mame_sd.eval.cli import app as evaluation
from mame_sd.pipelines import StableDiffusionMaMePipeline
models, into, *generate = sys.argv[1:]
assert app.run([*generate, "--out", "run"]) == 2  # without the models
os.symlink(models, into)  # as their own wheel puts them there
models_folder.cache_clear()
assert app.run([*generate, "--out", "run"]) == 0
print(mame_sd.__file__, StableDiffusionMaMePipeline.__module__)
assert evaluation.run(["score", "run", "run", "--metrics", "psnr", "--json"]) == 0
"""
GENERATE = ["generate", "key on a white background", "--steps", "1"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing that was built before gets into it."""
    folder = tmp_path_factory.mktemp("wheel")
    unlike = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=unlike)
    set_links(folder / "source")  # as for a release
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    done = subprocess.run(
        [*command, "--outdir", str(folder), str(folder / "source")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def texts(wheel: Path) -> dict[str, str]:
    """Return the content of the wheel by the name of each file."""
    with zipfile.ZipFile(wheel) as archive:
        return {n: archive.read(n).decode(errors="replace") for n in archive.namelist()}


def test_only_mame_sd_lands_at_top_level_with_both_commands(texts: dict[str, str]) -> None:
    names = set(texts)
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"mame_sd"}
    assert {"mame_sd/py.typed", "mame_sd/prompts/demo.txt"} <= names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    evaluation = [
        path
        for path in (ROOT / "eval").rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.parent.parts[-2:] != ("instruments", "weights")  # 32 MB, of a clone alone
    ]
    assert evaluation
    assert not any(n.endswith(".safetensors") for n in names)
    assert {f"mame_sd/{path.relative_to(ROOT).as_posix()}" for path in evaluation} <= names
    (points,) = (text for name, text in texts.items() if name.endswith("entry_points.txt"))
    assert points.splitlines()[1:] == [
        "mame-sd = mame_sd.__main__:main",
        "mame-sd-eval = mame_sd.eval.__main__:main",
        "",
        "[vllm_omni.general_plugins]",
        "mame_sd = mame_sd.engines.vllm_omni:register",
    ]


def test_the_wheel_is_light_and_the_models_are_a_distribution_of_their_own(wheel: Path) -> None:
    assert wheel.stat().st_size < 1_000_000
    models = tomllib.loads(
        (ROOT / "mame_sd" / "embedded" / "pyproject.toml").read_text(encoding="utf-8")
    )
    packages = {f"mame_sd_models.{name}" for name in (*embedded_models(), "captioner", "few_steps")}
    assert packages == set(models["tool"]["setuptools"]["packages"])


def test_links_of_the_description_lead_somewhere_from_anywhere(texts: dict[str, str]) -> None:
    """A package index shows README.md without the files beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (text,) = (text for name, text in texts.items() if name.endswith("dist-info/METADATA"))
    assert "Description-Content-Type: text/markdown" in text
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert [t for t in targets if not t.startswith(("https://", "#"))] == []
    place, tag = project["urls"]["Repository"], f"v{project['version']}"
    ours = [re.fullmatch(rf"{place}/(raw|blob)/{tag}/([^#]+)(#.*)?", t) for t in targets]
    files = {found[2]: found[1] for found in ours if found}
    assert len(files) > 10
    for name, kind in files.items():
        assert (ROOT / name).exists(), name
        assert (kind == "raw") == name.endswith(".webp"), name


def test_the_installed_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    parents = [p for p in sys.path if p.endswith("site-packages")]
    # Libraries of the running environment come after the wheel.
    (site / "zz_parent.pth").write_text("\n".join(parents) + "\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(site), str(wheel)], check=True)
    places = [str(ROOT / "mame_sd" / "embedded"), str(site / "mame_sd_models")]
    done = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "python"), "-c", INSTALLED, *places, *GENERATE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "expected the embedded models, found none; pip install 'mame-sd[models]'" in done.stderr
    assert len(list(tmp_path.glob("run/images/*.png"))) == 1
    lines = done.stdout.splitlines()
    (place,) = (n for n, line in enumerate(lines) if line.startswith(str(site)))
    (_, module), scores = lines[place].split(), "".join(lines[place + 1 :])
    assert module == "mame_sd.pipelines.stable_diffusion_mame"
    assert json.loads(scores)["metrics"]["psnr"]["equal"] == 1


def test_every_public_name_is_there_and_loads_nothing_before_it_is_asked_for() -> None:
    for name in mame_sd.__all__:
        assert getattr(mame_sd, name) is not None, name
    assert mame_sd.__version__ == version("mame-sd")
    code = "import sys, mame_sd; dir(mame_sd); mame_sd.__version__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"
