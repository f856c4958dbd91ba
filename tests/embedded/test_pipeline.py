"""Pipelines of embedded models carry their own steps and guidance."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
from diffusers import StableDiffusionPipeline

from mame_sd import embedded_pipeline
from mame_sd.pipelines import StableDiffusionMaMePipeline


def test_calls_default_to_the_models_own_guidance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise InterruptedError

    monkeypatch.setattr(StableDiffusionPipeline, "encode_prompt", stop)
    pipe = embedded_pipeline()
    for call in ({}, {"guidance_scale": 3.0, "num_inference_steps": 2}):
        with pytest.raises(InterruptedError):
            pipe("key on a pink background", **call)
        assert pipe.guidance_scale == call.get("guidance_scale", 1.25)
    found = inspect.signature(pipe.__call__).parameters
    assert (found["num_inference_steps"].default, found["guidance_scale"].default) == (20, 1.25)
    with pytest.raises(
        TypeError, match=r"StableDiffusionPipeline.__call__\(\) got multiple values"
    ):
        pipe("key", prompt="key")
    pipe.save_pretrained(tmp_path / "saved")
    assert (
        type(StableDiffusionPipeline.from_pretrained(tmp_path / "saved")) is StableDiffusionPipeline
    )


def test_a_pipeline_class_of_ours_has_them_too() -> None:
    pipe = embedded_pipeline(kind=StableDiffusionMaMePipeline, keep=0.5)
    assert isinstance(pipe, StableDiffusionMaMePipeline)
    assert inspect.signature(pipe.__call__).parameters["guidance_scale"].default == 1.25
    assert pipe.keep == 0.5


def test_loading_warns_of_nothing_and_leaves_the_libraries_as_talkative(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        @staticmethod
        def from_pretrained(path: Any, **options: Any) -> Any:
            raise ValueError("nothing")

    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    levels = [logger.getEffectiveLevel() for logger in loggers]
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    embedded_pipeline("unet")
    with pytest.raises(ValueError, match="nothing"):
        embedded_pipeline("unet", kind=Refusing)
    assert caplog.messages == []
    assert [logger.getEffectiveLevel() for logger in loggers] == levels
