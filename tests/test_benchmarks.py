"""The benchmark of attention measures what it says: a gate that can fail."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention

CPU = torch.device("cpu")


def test_attention_is_timed_beside_all_keys_and_what_computes_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, times = attention.row(64, 1, CPU, torch.float32, 2)
    assert seconds > 0
    assert len(times) == len(attention.KEEPS)
    assert min(times) > 0
    fault = torch.float32  # computes nothing in it
    monkeypatch.setattr(attention, "attention", lambda q, *rest, keep: q * (q.dtype != fault))
    with pytest.raises(SystemExit, match="expected float64's output"):
        attention.row(64, 1, CPU, fault, 1)
