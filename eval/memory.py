"""Memory on the CPU, from the profiler's record of every allocation. CUDA counts by itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.profiler import ProfilerActivity, profile

ALLOCATION = "[memory]"


def allocations(call: Callable[[], object]) -> list[tuple[str, int]]:
    """What `call` records, in order: the name of each event, and the bytes that are allocated by
    then beyond those before.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    profiler = found.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    alive, steps = 0, []
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == ALLOCATION:
            alive += event.nbytes()
        steps.append((event.name(), alive))
    return steps


def most(steps: list[tuple[str, int]]) -> int:
    """Most bytes that were allocated at once, 0 at least."""
    return max([0, *(alive for _, alive in steps)])


def weight_bytes(modules: list[nn.Module]) -> int:
    """Bytes of the parameters and buffers of `modules`, shared ones once."""
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
