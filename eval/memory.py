"""Measure memory on a CPU, from the profiler's record of every allocation."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.profiler import ProfilerActivity, profile

ALLOCATION = "[memory]"


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the largest number of bytes that a call allocates at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    profiler = profiled.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    alive = peak = 0
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == ALLOCATION:
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def weight_bytes(modules: list[nn.Module]) -> int:
    """Return the bytes of the parameters and buffers of modules; shared ones count once."""
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
