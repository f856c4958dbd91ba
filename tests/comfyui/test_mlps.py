"""MLPs in the node: those of the image are computed on a few tokens, by mode and by file."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mame_sd import restored
from mame_sd.core.cells import DRAWS
from mame_sd.core.guidance import partition_index
from tests.comfyui.interface import Model, applied, network

GRID = 8, 12
TEXT = 7
KEPT = "MaMe merged 96 -> 24 tokens of MLPs at 8 x 12"
MLP = {"keep": 1.0, "mlp_keep": 0.25}


class Block(nn.Module):
    """A double block's MLP of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.img_mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(2))
    return Model(network("Flux", patch_size=2, double_blocks=blocks))


def mlp_of(model: Model, block: int = 0) -> Any:
    network: Any = model.network
    return network.double_blocks[block].img_mlp


def tokens(count: int = 96, seed: int = 1) -> Tensor:
    return torch.randn(2, count, 16, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model: Model, x: Tensor, block: int = 0, sigma: float = 0.5) -> Tensor:
    """One call of the model, in which one block's MLP is called with x."""
    latent, text = torch.zeros(2, 16, 16, 24), torch.zeros(2, TEXT, 24)
    mlp = mlp_of(model, block)
    with model.patched():
        output: Tensor = model.apply_model(latent, sigma, lambda _: mlp(x), context=text)
    return output


@torch.no_grad()
def expected(model: Model, x: Tensor, block: int = 0, sigma: float = 0.5) -> Tensor:
    draw = (partition_index(torch.tensor(sigma * 1000)) + block) % DRAWS
    mlp = mlp_of(model, block)
    return restored(mlp, x, GRID, 0.25, draw=draw)


def test_an_mlp_is_computed_on_a_few_tokens_and_restored(node: Any, model: Model) -> None:
    x, patched = tokens(), applied(node, model, **MLP)
    plain = run(model, x)
    for block, sigma in ((0, 0.5), (1, 0.5), (0, 0.9)):
        torch.testing.assert_close(
            run(patched, x, block, sigma), expected(model, x, block, sigma), msg=str((block, sigma))
        )
    assert not torch.allclose(run(patched, x), plain)
    assert torch.equal(run(model, x), plain), "the model that came in is as it was"
    text = tokens(TEXT)
    assert torch.equal(run(patched, text), run(model, text))
    mlp = mlp_of(model)
    with patched.patched():
        assert torch.equal(mlp(x), plain), "outside of a call all tokens are computed"


def test_threads_share_a_node(node: Any, model: Model) -> None:
    patched = applied(node, model, **MLP)
    given = [(tokens(seed=i), 0.1 + 0.2 * i) for i in range(4)]
    wanted = [expected(model, x, sigma=sigma) for x, sigma in given]
    latent, mlp = torch.zeros(2, 16, 16, 24), mlp_of(model)

    @torch.no_grad()
    def same(i: int) -> bool:
        x, sigma = given[i]
        runs = (patched.apply_model(latent, sigma, lambda _: mlp(x)) for _ in range(10))
        return all(torch.allclose(run, wanted[i], atol=1e-5) for run in runs)

    with patched.patched(), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, range(4)))


def test_a_file_restores_some_mlps(node: Any, model: Model, tmp_path: Path, caplog: Any) -> None:
    file, x = tmp_path / "settings.json", tokens()
    rules: dict[str, Any] = {"transformer_blocks.0": False}
    rules["transformer_blocks.1"] = {"keep": 1, "mlp_keep": 0.25, "block_keep": 1}
    values = {"min_tokens": 16, "layers": rules}
    file.write_text(json.dumps(values), encoding="utf-8")
    patched = applied(node, model, settings=str(file))
    caplog.set_level("INFO", logger="mame-sd")
    outputs = patched.sample(lambda own: [run(own, x, block) for block in (0, 1)])
    assert torch.equal(outputs[0], run(model, x))
    torch.testing.assert_close(outputs[1], expected(model, x, 1))
    assert caplog.messages == [KEPT]
    rules["transformer_blocks.1"]["block_keep"] = 0.5
    file.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ValueError, match="block_keep: expected 1, since ComfyUI's blocks can't"):
        applied(node, model, settings=str(file))


def test_by_default_large_mlps_are_restored_and_a_run_says_why_not(
    node: Any, model: Model, caplog: Any
) -> None:
    x = tokens()
    patched = applied(node, model, mode="default", min_tokens=0)
    run_of = patched.sample(lambda own: run(own, x))
    assert torch.equal(run_of, run(model, x))
    assert "a fit needs 1,024 tokens, and it has 96" in caplog.messages[0]
    assert not torch.equal(run(applied(node, model, mode="default"), x), run_of)


def test_a_model_whose_mlps_are_not_known_is_refused(node: Any) -> None:
    lumina = Model(network("NextDiT", patch_size=2))
    with pytest.raises(ValueError, match="mlp_keep: expected 1 for Lumina 2 or Z-Image, whose"):
        applied(node, lumina, **MLP)
    applied(node, lumina, mode="default")
