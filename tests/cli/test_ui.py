"""The page of `mame-sd ui`: what its button computes, and the page itself in a real Chromium."""

from __future__ import annotations

import inspect
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pytest

from mame_sd import MaMeConfig, UserError
from mame_sd.cli import app as cli
from mame_sd.cli.app import ui_command
from mame_sd.cli.show_merge import capture_merge
from mame_sd.cli.ui import SideBySide, build_page, serve
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from tests.builders.chromium import chromium
from tests.builders.console import error_of
from tests.builders.tiny import save_tiny_pipeline

ROOT = Path(__file__).parents[2]
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
    plain, merged, drawn, table = both.generate("key", "tau", 0.5, 1.0, 2, 0, 9)
    assert plain.size == merged.size == drawn.size == (512, 512)
    assert (
        np.abs(np.asarray(plain, int) - np.asarray(merged, int)).max() <= 1
    )  # tau 1 merges nothing
    assert "256 of 256 (100%)" in table
    again, merged, drawn, table = both.generate("key", "keep", 0.5, 1.0, 2, 0, 9)
    assert np.array_equal(again, plain)
    assert "keys kept, largest level, step 2 | 256 of 256 | 128 of 256 (50%)" in table
    expected = capture_merge(model, "key", GenerateSettings(steps=2), SMALL.replace(keep=0.5), 2)
    assert np.array_equal(np.asarray(merged)[::16, ::16], expected.image)
    assert not np.array_equal(drawn, merged)


def test_the_button_says_what_the_command_line_says(model: LoadedModel) -> None:
    both = SideBySide(model, SMALL.replace(tau=-1.0, metric="euclidean"))
    for values, message in (
        (("", "keep", 0.5, 0.8, 2, 0, 1), "expected a prompt, got an empty one"),
        (
            ("key", "tau", 0.5, 0.8, 2, 0, 1),
            "tau: expected a finite number from -inf to 0 for metric 'euclidean'",
        ),
        (("key", "keep", 0.5, 0.8, 0, 0, 1), "--steps: expected at least 1"),
        (("key", "keep", 0.5, 0.8, 2, -1, 1), "--seed: expected"),
        (
            ("key", "keep", 0.5, 0.8, 2, None, 1),
            "Seed: expected a whole number, got an empty field",
        ),
        (("key", "keep", 0.5, 0.8, 2, 0.5, 1), "Seed: expected a whole number, got 0.5"),
        (("key", "keep", 0.5, 0.8, 2, float("inf"), 1), "Seed: expected a whole number, got inf"),
        (("key", "keep", 0.5, 0.8, 2.5, 0, 1), "Steps: expected a whole number, got 2.5"),
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
    *images, said = button.fn("key", "keep", 0.5, 0.8, 2, 0, 1)
    assert images == [None] * 3
    assert "the card fell off the bus" in said
    assert "the card fell off the bus" in error_of(capsys)


def test_the_page_names_its_model_size_and_guidance(
    model: LoadedModel, address: str, browser: Any
) -> None:
    about = SideBySide(model, SMALL).about
    assert about.startswith("tiny (StableDiffusionPipeline), 32 x 32 pixels, guidance 7.5")
    told = replace(model, guidance=1.25)
    assert "guidance 1.25" in SideBySide(told, SMALL).about
    page = browser.new_page()
    page.goto(address)
    page.get_by_text(about).wait_for()


def test_the_page_in_a_browser(address: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request",
        lambda r: None if r.url.startswith((address, "data:", "blob:")) else trouble.append(r.url),
    )
    page.goto(address)
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
    page.get_by_label("tau", exact=True).first.check()
    page.get_by_label("number input for tau").fill("1")
    page.get_by_label("Prompt").press("Enter")
    page.get_by_text("256 of 256 (100%)").wait_for()
    page.get_by_label("Prompt").fill("")
    page.get_by_role("button", name="Generate").click()
    page.get_by_text("expected a prompt, got an empty one; write some words").wait_for()
    assert pictures.count() == 0, "no image stands beside an error that it has nothing to do with"
    assert trouble == []


def answer(
    address: str, path: str, method: str = "GET", body: bytes | None = None
) -> tuple[int, bytes]:
    """Status and body of one request, its path sent as it is written."""
    place = urlsplit(address)
    connection = HTTPConnection(place.hostname or "", place.port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        found = connection.getresponse()
        return found.status, found.read()
    finally:
        connection.close()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_it_listens_on_this_machine_alone(address: str) -> None:
    port = f"{urlsplit(address).port:04X}"
    listening = [
        place.rpartition(":")[0]
        for table in ("tcp", "tcp6")
        for place, state in (
            line.split()[1:4:2] for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        )
        if place.endswith(f":{port}") and state == "0A"
    ]
    assert listening == ["0100007F"]  # 127.0.0.1


def test_this_machine_alone_is_the_default() -> None:
    assert inspect.signature(ui_command).parameters["host"].default == "127.0.0.1"


def test_files_outside_are_refused(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = b"the secret of this file"
    (tmp_path / "secret.txt").write_bytes(secret)
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path / "secret.txt")
    ways = [
        here,
        "secret.txt",
        f"..{here}",
        quote(here, safe=""),
        f"/tmp/gradio/../..{here}",
        f"file://{here}",
        here + "%00.png",
    ]
    for way in [
        *ways,
        "/etc/passwd",
        "../../../../etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
        "....//....//etc/passwd",
    ]:
        for route in (
            "file=",
            "file/",
            "static/",
            "assets/",
            "custom_component/",
            "proxy=",
            "stream/x/",
        ):
            for start in ("/gradio_api/", "/"):
                status, body = answer(address, f"{start}{route}{way}")
                assert status >= 400, f"{start}{route}{way}"
                assert secret not in body
                assert b"root:" not in body
    assert answer(address, "/gradio_api/proxy=http://127.0.0.1:1/")[0] >= 400


def test_a_forged_call_ends_in_an_error_or_words(address: str) -> None:
    good = ["key", "keep", 0.5, 0.8, 2, 0, 1]
    wrong = [None, [], {}, "x", -1, 1e400, "nan", "<script>", {"path": "/etc/passwd"}, "\ud800"]
    forged: list[list[Any]] = [[], good[:3], good + good]
    forged += [
        [*good[:n], wrong[(2 * n + m) % len(wrong)], *good[n + 1 :]]
        for n in range(len(good))
        for m in (0, 1)
    ]
    for data in forged:
        status, body = answer(
            address, "/gradio_api/call/generate", "POST", json.dumps({"data": data}).encode()
        )
        if status == 200:
            event = json.loads(body)["event_id"]
            status, body = answer(address, f"/gradio_api/call/generate/{event}")
        assert b"Traceback" not in body
        assert b"root:" not in body
    status, body = answer(
        address, "/gradio_api/call/generate", "POST", json.dumps({"data": good}).encode()
    )
    assert (
        b"complete"
        in answer(address, f"/gradio_api/call/generate/{json.loads(body)['event_id']}")[1]
    )


def test_nothing_is_asked_of_other_machines(model: LoadedModel, tmp_path: Path) -> None:
    """In a process of its own, where an audit hook sees every connection."""
    pytest.importorskip("gradio", reason="pip install mame-sd[ui] brings it")
    model_folder = save_tiny_pipeline(tmp_path / "model")
    code = f"""
import sys
asked, here = [], ("127.0.0.1", "::1", "localhost", None)
def hook(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        asked.append(arguments[1][0])
    if event == "socket.getaddrinfo":
        asked.append(arguments[0])
sys.addaudithook(hook)
from mame_sd import MaMeConfig
from mame_sd.cli.ui import SideBySide, build_page, serve
from mame_sd.runs.loading import load_model
from mame_sd.runs.model_files import ModelChoice
loaded = load_model(ModelChoice(model={str(model_folder)!r}, device="cpu"))
both = SideBySide(loaded, MaMeConfig(min_tokens=16))
page = serve(both, "127.0.0.1", 0)
both.generate("<script>", "keep", 0.5, 0.8, 1, 0, 1)
page.close(verbose=False)
print([name for name in asked if name not in here])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_port_that_is_taken_is_one_line(
    model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
