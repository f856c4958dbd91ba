"""Measure memory on a CPU by the profiler's record of every allocation. CUDA counts by itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.profiler import ProfilerActivity, profile

ALLOCATION = "[memory]"


def allocations(call: Callable[[], object]) -> list[tuple[str, int]]:
    """Record the allocations of a call.

    Returns:
        The name of each event in order, and the bytes that are allocated by then beyond those at
        the start.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    profiler = profiled.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    alive, steps = 0, []
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == ALLOCATION:
            alive += event.nbytes()
        steps.append((event.name(), alive))
    return steps


def most(steps: list[tuple[str, int]]) -> int:
    """Return the largest number of bytes that were allocated at once, at least 0."""
    return max([0, *(alive for _, alive in steps)])


def weight_bytes(modules: list[nn.Module]) -> int:
    """Return the bytes of the parameters and buffers of modules; shared ones count once."""
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
