"""The gate of the ceiling. test_run.py lets all others fail."""

from __future__ import annotations

import math
from pathlib import Path

from mame_sd.eval.benchmark.gates import ceiling_gate, unrelated_pairs
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.metrics.lpips import Lpips
from mame_sd.eval.results.schema import Value
from mame_sd.eval.scoring.per_image import pair_values
from mame_sd.eval.scoring.runs import Run
from mame_sd.eval.scoring.tools import Tools
from tests.builders import seeded
from tests.builders.metrics import oracle
from tests.builders.run_folders import write_run


def test_the_ceiling_gate_fails_when_any_method_is_as_far_as_another_prompt(tmp_path: Path) -> None:
    shapes = oracle("lpips")["alex"]["shapes"]
    network = Lpips(seeded.weights({name: tuple(shape) for name, shape in shapes.items()}))
    pictures = {f"{n}_0": seeded.picture(f"ceiling {n}", 64, 64) for n in range(3)}
    baseline = Run.open(write_run(tmp_path / "run", pictures))
    tools = Tools(networks={"lpips-alex": network})
    metrics = [METRICS["psnr"], METRICS["lpips"]]
    unrelated = pair_values(metrics, unrelated_pairs(baseline), tools)
    ceiling = {name: sum(values.values()) / 3 for name, values in unrelated.items()}

    def passes(**factors: float) -> bool:
        """With one method that equals the baseline, and one at so many times the ceiling."""
        equal = {"psnr": Value(mean=math.inf), "lpips": Value(mean=0.0)}
        other = {name: Value(mean=ceiling[name] * factor) for name, factor in factors.items()}
        gate = ceiling_gate(baseline, [METRICS[name] for name in factors], [equal, other], tools)
        assert gate is not None
        return gate.passed

    assert passes(psnr=1.1, lpips=0.9)
    assert not passes(psnr=0.9, lpips=0.9)
    assert not passes(psnr=1.1, lpips=1.1)
    for name in ceiling:
        assert not passes(**{name: 1.0})
