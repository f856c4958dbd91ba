"""LPIPS against its authors' code, on seeded and on published weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchmetrics

from mame_sd.errors import UserError
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.metrics.lpips import Lpips, load_lpips
from mame_sd.eval.weights.files import read_state_dict
from tests.builders import seeded
from tests.builders.metrics import oracle


def seeded_lpips(net: str) -> Lpips:
    return Lpips(
        net,
        seeded.weights(
            {name: tuple(shape) for name, shape in oracle("lpips")[net]["shapes"].items()}
        ),
    )


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_lpips_is_its_authors_on_seeded_weights(net: str) -> None:
    assert seeded_lpips(net)(*seeded.picture_pairs()).tolist() == pytest.approx(
        oracle("lpips")[net]["distances"], rel=1e-5
    )
    assert METRICS[{"alex": "lpips", "vgg": "lpips_vgg"}[net]].network == seeded_lpips(net).name


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_lpips_is_its_authors_on_the_published_weights(net: str) -> None:
    try:
        lpips = load_lpips(net, offline=True)
    except UserError as error:
        pytest.skip(str(error))
    assert lpips(*seeded.picture_pairs()).tolist() == pytest.approx(
        oracle("lpips")[net]["published"], rel=1e-4
    )
    # another package's copy of the authors' weights
    package = Path(torchmetrics.__file__).parent
    heads = read_state_dict(package / "functional" / "image" / "lpips_models" / f"{net}.pth")
    for index, head in enumerate(heads.values()):
        assert torch.equal(lpips.tensors[f"head{index}"], head.flatten())


def test_lpips_refuses_wrong_ranges_sizes_and_nets() -> None:
    lpips = seeded_lpips("alex")
    a, b = seeded.picture_pairs()
    for other, why in ((2 * b - 1, "0 to 1"), (b * 255, "0 to 1"), (b[:1], "one shape")):
        with pytest.raises(ValueError, match=why):
            lpips(a, other)
    with pytest.raises(ValueError, match="at least 32 x 32 for LPIPS, got 86 x 31"):
        lpips(a[..., :31, :], b[..., :31, :])
    with pytest.raises(ValueError, match="LPIPS net of alex, vgg, got 'resnet'"):
        Lpips("resnet", {})
