"""The benchmark of attention measures what it says: a gate that can fail."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention

CPU = torch.device("cpu")


def test_attention_is_timed_beside_all_keys_and_what_computes_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = attention.row(64, 1, CPU, torch.float32, 2)
    for keep in attention.KEEPS:
        low, median, high = found[str(keep)]
        assert 0 < low <= median <= high
    fault = torch.float32  # computes nothing in it
    monkeypatch.setattr(attention, "attention", lambda q, *rest, keep: q * (q.dtype != fault))
    with pytest.raises(SystemExit, match="expected float64's output"):
        attention.row(64, 1, CPU, fault, 1)
