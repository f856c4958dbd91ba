"""Records what other people's evaluation code says, into tests/oracles/eval.json, for tests to
compare with.

They need torchvision, and so cannot be installed beside every torch (its wheel on PyPI wants CUDA's
libraries). In an environment with one that fits, ours installed in it too, and weights found or
fetched:

    pip install torch-fidelity==0.4.0 clean-fid==0.1.35 lpips==0.1.4
    python -m tests.record_oracles
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mame_sd.eval.weights.load import load
from tests.builders import seeded

OUT = Path(__file__).parent / "oracles" / "eval.json"
TAPS = slice(None, None, 97)  # of a long vector, these are recorded


def inception() -> dict[str, Any]:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    names = ["2048", "logits_unbiased"]
    convolutions = json.loads((OUT.parent / "inception_convolutions.json").read_text())
    with tempfile.NamedTemporaryFile(suffix=".pth") as file:
        torch.save(seeded.inception_weights(convolutions), file.name)
        network = FeatureExtractorInceptionV3(
            "oracle", names, feature_extractor_weights_path=file.name
        )
    pictures = np.stack([seeded.picture(f"inception {i}", 299, 299) for i in range(2)])
    features, logits = network(torch.from_numpy(pictures).permute(0, 3, 1, 2))
    return {"features": features[:, TAPS].tolist(), "logits": logits[:, TAPS].tolist()}


def whole_path() -> dict[str, Any]:
    """torch-fidelity from two sets of pictures to its three scores, on a local file of weights."""
    from torch.utils.data import Dataset
    from torch_fidelity import calculate_metrics

    class Pictures(Dataset[torch.Tensor]):
        def __init__(self, side: str) -> None:
            self.pictures = [
                torch.from_numpy(picture).permute(2, 0, 1) for picture in seeded.inception_set(side)
            ]

        def __len__(self) -> int:
            return len(self.pictures)

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.pictures[index]

    convolutions = json.loads((OUT.parent / "inception_convolutions.json").read_text())
    with tempfile.NamedTemporaryFile(suffix=".pth") as file:
        torch.save(seeded.inception_weights(convolutions), file.name)
        found = calculate_metrics(
            input1=Pictures("a"),
            input2=Pictures("b"),
            fid=True,
            kid=True,
            isc=True,
            kid_subsets=1,
            kid_subset_size=4,
            isc_splits=2,
            samples_shuffle=False,
            feature_extractor_weights_path=file.name,
            cuda=False,
            cache=False,
            verbose=False,
        )
    return {name: float(value) for name, value in found.items()}


def inception_convolutions() -> dict[str, list[int]]:
    """Shape of each convolution's weights, by its name in the state dict."""
    from torch_fidelity import feature_extractor_inceptionv3 as module

    shapes: dict[str, list[int]] = {}

    class Recorder(module.FeatureExtractorInceptionV3):  # type: ignore[misc]
        def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
            shapes.update(
                {
                    name.removesuffix(".conv.weight"): list(value.shape)
                    for name, value in self.state_dict().items()
                    if name.endswith(".conv.weight")
                }
            )

    with tempfile.NamedTemporaryFile(suffix=".pth") as file:
        torch.save({}, file.name)
        Recorder("shapes", ["2048"], feature_extractor_weights_path=file.name)
    return shapes


def resizing() -> dict[str, Any]:
    from cleanfid.resize import make_resizer

    picture = seeded.picture("resize", 90, 130)
    return {
        str(side): make_resizer("PIL", False, "bicubic", (side, side))(picture)[::37, ::41].tolist()
        for side in (299, 50)
    }


def lpips() -> dict[str, Any]:
    from lpips import LPIPS

    a, b = seeded.picture_pairs()
    found: dict[str, Any] = {}
    for net in ("alex", "vgg"):
        model = LPIPS(net=net, pretrained=False, pnet_rand=True, verbose=False)
        convolutions = [name for name, value in model.net.named_parameters() if value.ndim == 4]
        shapes = {
            f"conv{i}.{kind}": tuple(model.net.get_parameter(name.replace("weight", kind)).shape)
            for i, name in enumerate(convolutions)
            for kind in ("weight", "bias")
        }
        shapes |= {f"head{i}": (channels,) for i, channels in enumerate(model.chns)}
        tensors = seeded.weights(shapes)
        _fill(model, convolutions, tensors)
        found[net] = {"shapes": shapes, "distances": model(2 * a - 1, 2 * b - 1).flatten().tolist()}
        _fill(model, convolutions, load(f"lpips-{net}"))
        found[net]["published"] = model(2 * a - 1, 2 * b - 1).flatten().tolist()
    return found


@torch.no_grad()
def _fill(model: Any, convolutions: list[str], tensors: dict[str, torch.Tensor]) -> None:
    model.eval()
    for i, name in enumerate(convolutions):
        for kind in ("weight", "bias"):
            model.net.get_parameter(name.replace("weight", kind)).copy_(tensors[f"conv{i}.{kind}"])
    for i, head in enumerate(model.lins):
        head.model[1].weight.copy_(tensors[f"head{i}"][None, :, None, None])


def distances() -> dict[str, Any]:
    from cleanfid.fid import frechet_distance, kernel_distance
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_isc import isc_features_to_metric
    from torch_fidelity.metric_kid import mmd2

    a, b = (x.double() for x in seeded.feature_sets())
    kernels = [((x @ y.T / x.shape[1] + 1) ** 3).numpy() for x, y in ((a, a), (a, b), (b, b))]
    statistics = [fid_features_to_statistics(x) for x in (a, b)]
    moments = [(x.mean(0).numpy(), np.cov(x.numpy(), rowvar=False)) for x in (a, b)]
    return {
        "fid of clean-fid": float(frechet_distance(*moments[0], *moments[1])),
        "fid": float(
            fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
        ),
        "kid": float(mmd2(*kernels, mmd_est="unbiased")),
        "kid paired": float(mmd2(*kernels, mmd_est="u-statistic")),
        "kid of clean-fid": kernel_distance(a.numpy(), b.numpy(), num_subsets=1),
        "isc": list(isc_features_to_metric(4 * a, splits=3, shuffle=False).values()),
    }


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    (OUT.parent / "inception_convolutions.json").write_text(
        json.dumps(inception_convolutions(), indent=0) + "\n"
    )
    parts = (inception, whole_path, resizing, lpips, distances)
    OUT.write_text(json.dumps({part.__name__: part() for part in parts}, indent=1) + "\n")
    print(f"wrote {OUT}")
