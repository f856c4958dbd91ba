"""For the whole suite: no network, one thread, and one tiny model for all.

Libraries are imported where they are used, because the process of `-n 2` that only hands tests out
needs none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mame_sd.runs.loading import LoadedModel

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that compile merging if torch is too old for that.

    Hypothesis would read the constants of every loaded module, which takes seconds; it is kept from
    that.
    """
    import torch
    from diffusers.utils import logging

    from mame_sd.compat import COMPILES

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if not COMPILES:
        for item in items:
            if item.get_closest_marker("compiles"):
                item.add_marker(pytest.mark.skip(reason="merging compiles from torch 2.13 on"))
    if "hypothesis" in sys.modules:
        from hypothesis.internal.conjecture import providers

        providers.is_local_module_file = lambda path: False


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Stable Diffusion pipeline. A test that changes it works on a copy."""
    from tests.builders.tiny import save_tiny_pipeline

    return save_tiny_pipeline(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(model_folder: Path) -> LoadedModel:
    from mame_sd.runs.loading import load_model
    from mame_sd.runs.model_files import ModelChoice

    return load_model(ModelChoice(model=str(model_folder), device="cpu"))
