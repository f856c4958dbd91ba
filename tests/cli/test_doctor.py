"""mame-sd doctor: what it says of this machine and of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mame_sd.cli import app as cli
from mame_sd.cli.doctor import _attention
from mame_sd.errors import MachineError
from tests.builders.console import error_of


def test_doctor_says_what_would_fail(
    capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    assert cli.run(["doctor", "--device", "cpu", "--model", str(model_folder)]) == 0
    out = capsys.readouterr().out
    for name in ("torch", "device", "attention", "model"):
        assert any(line[6:].startswith(name) for line in out.splitlines()), name
    assert " flash, with a bias flash (off by " in out
    assert "layers merge from 1,024 tokens on by default" in out
    assert cli.run(["doctor", "--device", "cpu", "--model", "nowhere"]) == 2
    out, err = capsys.readouterr()
    assert "fail  model" in out
    assert err.splitlines()[-1].startswith("error: --model nowhere: expected a folder")
    assert cli.run(["doctor", "--device", "cuda:99", "--model", str(model_folder)]) == 2
    assert "--device cuda:99: expected auto or a device of this machine" in error_of(capsys)


def test_doctor_finds_a_kernel_that_ignores_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch.nn.functional.scaled_dot_product_attention

    def without(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return kernel(q, k, v)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", without)
    with pytest.raises(MachineError, match="attention with a bias: expected the formula's output"):
        _attention(torch.device("cpu"))
