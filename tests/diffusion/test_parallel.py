"""A model that is spread over two processes (by gloo, on the CPU) is refused in one line, and runs
spread once merging is removed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

from mame_sd import apply_mame, remove_mame
from tests.builders.transformers import normal
from tests.matrix.transformers import ROWS

SPREAD = r"^FluxTransformer2DModel is spread over devices by enable_parallelism \(Ulysses, ring"


def process(rank: int, port: int, degree: str) -> None:
    """One of the two."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    dist.init_process_group("gloo", rank=rank, world_size=2)
    row = next(row for row in ROWS if row.name == "Flux")
    inputs: dict[str, Any] = {**row.inputs, "return_dict": False}
    inputs["encoder_hidden_states"] = normal(2, 8, 16)
    inputs["txt_ids"] = torch.zeros(8, 3)
    first, second = row.build(), row.build()
    with torch.no_grad():
        whole = first(**inputs)[0]
        apply_mame(second, keep=0.5, min_tokens=60)
        for model in (first, second):
            model.enable_parallelism(config=ContextParallelConfig(**{degree: 2}))
        with pytest.raises(ValueError, match=SPREAD):
            apply_mame(first, keep=0.5, min_tokens=60)
        with pytest.raises(RuntimeError, match=SPREAD):
            second(**inputs)
        remove_mame(second)
        for model in (first, second) if degree == "ulysses_degree" else ():  # native has no ring
            torch.testing.assert_close(model(**inputs)[0], whole, rtol=1e-4, atol=1e-4)
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("degree", ["ulysses_degree", "ring_degree"])
def test_a_model_that_is_spread_over_two_processes_is_refused(degree: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.diffusion.test_parallel"]
    both = [
        subprocess.Popen(
            [*command, str(rank), str(port), degree],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [one.communicate()[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], "\n".join(told)


if __name__ == "__main__":
    process(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
