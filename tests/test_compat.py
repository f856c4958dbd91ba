"""mame_sd.compat: every name is there, and one that is gone is named in one line."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from torch import nn

from mame_sd import apply_mame, compat
from mame_sd.caches import compress_cache
from mame_sd.cli import app as cli
from tests.builders.tiny import tiny_unet


@pytest.fixture
def _fresh() -> Iterator[None]:
    compat.missing.cache_clear()
    yield
    compat.missing.cache_clear()


def test_the_installed_releases_have_every_name() -> None:
    for library in compat.NAMES:
        assert compat.missing(library) == ()
        assert compat.complaint(library) == ""
    compat.require(*compat.NAMES)


def test_the_oldest_releases_are_those_of_the_package_and_of_its_oldest_test() -> None:
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["lora"]
    floors = {
        one.name: next(iter(one.specifier)).version
        for one in map(Requirement, (*project["dependencies"], *extra))
    }
    for library, releases in compat.RELEASES.items():
        assert releases.startswith(f"between {floors[library]} and ")
    lines = (root / ".ci" / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    for oldest in (Requirement(line) for line in lines if not line.startswith("#")):
        pinned, floor = next(iter(oldest.specifier)).version, floors[oldest.name]
        assert pinned == floor or pinned.startswith(f"{floor}."), oldest.name


CALLED: dict[str, Callable[[], object]] = {
    "torch": lambda: apply_mame(tiny_unet()),
    "diffusers": lambda: apply_mame(tiny_unet()),
    "transformers": lambda: compress_cache(nn.Identity()).__enter__(),
}


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("library", compat.NAMES)
def test_a_name_that_is_gone_is_told(
    library: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model_folder: Path,
) -> None:
    told = rf"{library} \d+\.\d+.*: expected a_name of {{}}, found none; install"
    for place in ("torch:NoSuchName", "nowhere:a", "torch"):
        compat.missing.cache_clear()
        monkeypatch.setitem(compat.NAMES, library, {place: "a_name"})
        with pytest.raises(RuntimeError, match=told.format(place)):
            CALLED[library]()
    assert cli.run(["doctor", "--device", "cpu", "--model", str(model_folder)]) == 1
    assert re.search(rf"^fail  {library} +{told.format('torch')}", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("name", compat.CACHE_NAMES)
def test_the_cache_is_found_by_both_names(name: str) -> None:
    def forward(hidden_states: object, **cache: object) -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind) for n in ("hidden_states", name)]
    )
    assert compat.cache_in({name: 3, "use_cache": True}) == 3
    assert compat.cache_in({name: None}) is None
    assert compat.cache_of(SimpleNamespace(**{name: 3})) == 3
    module = type("Module", (nn.Module,), {"forward": forward})()
    assert compat.with_cache(module, 3) == {name: 3}
    assert compat.with_cache(nn.Linear(1, 1), 3) == {compat.CACHE_NAMES[0]: 3}


IMPORTS = """
import sys, torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
import mame_sd.diffusion.layer, mame_sd.diffusion.processor
assert type(Registry._backends) is dict, "an import changes nothing of diffusers"
for name in [name for name in sys.modules if name.partition(".")[0] == "mame_sd"]:
    del sys.modules[name]
del torch._C._nn.scaled_dot_product_attention
try:
    from mame_sd import apply_mame
except RuntimeError as error:
    print(error)
"""


def test_an_import_changes_nothing_and_explains_a_name_that_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "expected scaled_dot_product_attention of torch._C:_nn, found none" in done.stdout
