"""Fixtures of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.model_files import ModelChoice
from tests.builders.benchmarks import benchmark, every_row


@pytest.fixture(scope="session")
def model(model_folder: Path) -> LoadedModel:
    return load_model(ModelChoice(model=str(model_folder), device="cpu"))


@pytest.fixture(scope="session")
def finished(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished benchmark."""
    out = tmp_path_factory.mktemp("benchmark") / "out"
    benchmark(model, out, rows=every_row()).run()
    return out
