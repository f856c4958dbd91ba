"""The cells of examples/quickstart.ipynb run; what they print and show is kept small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders.tiny import tiny_pipeline, tiny_unet

FILE = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
NOTEBOOK = json.loads(FILE.read_text(encoding="utf-8"))
CELLS = ["".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] == "code"]


def test_the_cells_run(capsys: pytest.CaptureFixture[str]) -> None:
    """With a tiny model of 1,024 tokens; CI runs the notebook as it is."""
    pipe = tiny_pipeline()
    pipe.register_modules(unet=tiny_unet(sample_size=32))
    code = "\n".join(CELLS).replace('embedded_pipeline("transformer")', "pipe")
    assert "PUBLISHED = False" in code
    scope: dict[str, object] = {"pipe": pipe}
    exec(compile(code, FILE.name, "exec"), scope)
    printed = capsys.readouterr().out
    assert "layers merge" in printed
    assert printed.count(" dB") == 4
    assert len(scope["images"]) == 5  # type: ignore[arg-type]


def test_outputs_are_those_of_one_whole_run_and_small() -> None:
    assert FILE.stat().st_size < 200_000
    run = [c for c in NOTEBOOK["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in run] == list(range(1, len(run) + 1))
    outputs = [output for cell in run for output in cell["outputs"]]
    assert {output.get("name", "result") for output in outputs} == {"stdout", "result"}
