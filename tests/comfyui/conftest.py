"""The node, loaded as ComfyUI loads custom nodes: by path, under a name that is not its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def package() -> ModuleType:
    name = "/custom_nodes/mame-sd"
    spec = importlib.util.spec_from_file_location(name, ROOT / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def node(package: ModuleType) -> Any:
    return package.NODE_CLASS_MAPPINGS["MaMeModelPatch"]()
