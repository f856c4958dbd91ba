"""The page of `mame-sd ui`: what its button computes, and the page itself in a real Chromium."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mame_sd import MaMeConfig, UserError
from mame_sd.cli import app as cli
from mame_sd.cli.show_merge import capture_merge
from mame_sd.cli.ui import SideBySide, build_page, serve
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from tests.builders.chromium import chromium
from tests.builders.console import error_of

SMALL = MaMeConfig(min_tokens=16)


@pytest.fixture(scope="module")
def address(model: LoadedModel) -> Iterator[str]:
    pytest.importorskip("gradio", reason="pip install mame-sd[ui] brings it")
    page = serve(SideBySide(model, SMALL), "127.0.0.1", 0, "a red key")
    yield page.local_url
    page.close(verbose=False)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


def test_both_images_are_of_the_same_noise(model: LoadedModel) -> None:
    both = SideBySide(model, SMALL)
    plain, merged, drawn, table = both.generate("key", 1.0, 2, 0, 9)
    assert plain.size == merged.size == drawn.size == (512, 512)
    assert np.array_equal(plain, merged), "all keys are kept"
    assert "256 of 256 (100%)" in table
    again, merged, drawn, table = both.generate("key", 0.5, 2, 0, 9)
    assert np.array_equal(again, plain)
    assert "keys kept, largest level, step 2 | 256 of 256 | 128 of 256 (50%)" in table
    expected = capture_merge(model, "key", GenerateSettings(steps=2), SMALL.replace(keep=0.5), 2)
    assert np.array_equal(np.asarray(merged)[::16, ::16], expected.image)
    assert not np.array_equal(drawn, merged)


def test_the_button_says_what_the_command_line_says(model: LoadedModel) -> None:
    both = SideBySide(model, SMALL)
    for values, message in (
        (("", 0.5, 2, 0, 1), "expected a prompt, got an empty one"),
        (("key", 0.0, 2, 0, 1), "keep: expected a share above 0"),
        (("key", 0.5, 0, 0, 1), "--steps: expected at least 1"),
        (("key", 0.5, 2, -1, 1), "--seed: expected"),
        (("key", 0.5, 2, None, 1), "Seed: expected a whole number, got an empty field"),
        (("key", 0.5, 2, float("inf"), 1), "Seed: expected a whole number, got inf"),
        (("key", 0.5, 2.5, 0, 1), "Steps: expected a whole number, got 2.5"),
    ):
        with pytest.raises(UserError, match=message):
            both.generate(*values)


def test_a_fault_is_one_line_and_leaves_no_image(
    model: LoadedModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gradio", reason="pip install mame-sd[ui] brings it")
    both = SideBySide(model, SMALL)
    calls = build_page(both).fns.values()
    button = next(call for call in calls if call.api_name == "generate")

    def fails(*values: Any) -> None:
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setattr(both, "generate", fails)
    *images, said = button.fn("key", 0.5, 2, 0, 1)
    assert images == [None] * 3
    assert "the card fell off the bus" in said
    assert "the card fell off the bus" in error_of(capsys)


def test_the_page_names_its_model_size_and_guidance(model: LoadedModel) -> None:
    about = SideBySide(model, SMALL).about
    assert about.startswith("tiny (StableDiffusionPipeline), 32 x 32 pixels, guidance 7.5")
    assert "guidance 1.25" in SideBySide(replace(model, guidance=1.25), SMALL).about


def test_the_page_in_a_browser(address: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request",
        lambda r: None if r.url.startswith((address, "data:", "blob:")) else trouble.append(r.url),
    )
    page.goto(address, timeout=180_000)  # milliseconds, for a busy machine
    page.get_by_label("Prompt").fill("a blue star")
    page.get_by_label("number input for Steps").fill("2")
    page.get_by_role("button", name="Generate").click()
    page.get_by_text(f"{256 * (MaMeConfig().keep or 0):.0f} of 256").wait_for()
    pictures = page.locator("img[src*='file=']")
    assert pictures.count() == 3
    page.wait_for_function(
        "[...document.querySelectorAll('img[src*=\"file=\"]')].every(image => image.complete)"
    )
    assert pictures.evaluate_all("images => images.map(image => image.naturalWidth)") == [512] * 3
    page.get_by_label("number input for keep").fill("1")
    page.get_by_label("Prompt").press("Enter")
    page.get_by_text("256 of 256 (100%)").wait_for()
    page.get_by_label("Prompt").fill("")
    page.get_by_role("button", name="Generate").click()
    page.get_by_text("expected a prompt, got an empty one; write some words").wait_for()
    assert pictures.count() == 0, "no image stands beside an error that it has nothing to do with"
    assert trouble == []


def test_a_port_that_is_taken_is_one_line(
    model: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gradio", reason="pip install mame-sd[ui] brings it")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"--port {port}: expected a port that is free on 127.0.0.1"
        ):
            serve(SideBySide(model, SMALL), "127.0.0.1", port)
    assert cli.run(["ui", "--port", "70000"]) == 2
    assert "--port: expected a number from 0 to 65535, got 70000" in error_of(capsys)
