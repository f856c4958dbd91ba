"""What the handles of denoisers, encoders and captioners share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mame_sd import apply_mame
from mame_sd.handle import Handle
from tests.builders.perception import NAMED
from tests.builders.tiny import tiny_unet
from tests.captions import tiny

MODELS: dict[str, Callable[[], Any]] = {
    "denoiser": tiny_unet,
    "encoder": lambda: NAMED["DeiTForImageClassification"].build(),
    "captioner": tiny.llava,
}


@pytest.fixture(params=MODELS)
def handle(request: pytest.FixtureRequest) -> Handle[Any]:
    return apply_mame(MODELS[request.param](), keep=0.75)


def test_using_changes_settings_for_its_block_alone(handle: Handle[Any]) -> None:
    before = handle.config
    with handle.using(keep=0.5):
        assert handle.config.keep != before.keep
    assert handle.config == before
    with pytest.raises(ValueError, match="keep"):
        handle.using(keep=2).__enter__()
    assert handle.config == before


def test_a_removed_handle_refuses_changes(handle: Handle[Any]) -> None:
    handle.remove()
    for change in (
        lambda: handle.set(keep=0.5),
        lambda: setattr(handle, "active", False),
        lambda: handle.using(keep=0.5).__enter__(),
    ):
        with pytest.raises(RuntimeError, match="expected merging to be applied"):
            change()
    handle.install()
    handle.active = False
    handle.set(keep=0.5)
    with pytest.raises(TypeError, match="active: expected True or False, got 'no'"):
        handle.active = "no"
    with pytest.raises(TypeError, match=r"config: expected a MaMeConfig or a file .*, got 0\.5"):
        handle.set(0.5)


def test_reports_have_the_tokens_of_each_layer(handle: Handle[Any]) -> None:
    report = handle.report()
    assert [layer.share for layer in report.layers] == [1.0] * len(report.layers) != []
    rows = json.loads(json.dumps(report.to_dict()))["layers"]
    assert [row["name"] for row in rows] == [layer.name for layer in report.layers]
    assert "token" in str(report)
