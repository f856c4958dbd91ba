"""mame-sd ui: the page is served, makes two images and their difference, and can be stopped."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

PROGRAM = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
PROGRAM += "from mame_sd.__main__ import main; main()"
VALUES = {"prompt": "key", "settings": "", "steps": "1", "seed": "0"}


def posted(address: str, path: str, **values: str) -> str:
    body = json.dumps({**VALUES, **values}).encode()
    request = Request(address + path, body, {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        text: str = answer.read().decode()
    return text


def test_the_page_makes_two_images_and_their_difference(model_folder: Path) -> None:
    given = ["ui", "--port", "0", "--model", str(model_folder), "--device", "cpu"]
    command = [sys.executable, "-c", PROGRAM, *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            check(process.stdout.readline().split()[0])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def check(address: str) -> None:
    assert address.startswith("http://127.0.0.1:")
    with urlopen(address) as answer:
        assert "<h2>Unmerged and merged: tiny</h2>" in answer.read().decode()
    made = posted(address, "/make", settings="keep=0.5,min_tokens=16")
    assert "<p>level 0: 128 of 256 keys kept; " in made
    assert re.findall(r"</b>([a-z]+)", made) == ["unmerged", "merged", "difference"]
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', made)
    assert len(set(pictures)) == 3
    assert posted(address, "/progress") == "<p>image 2 of 2 done</p>"
    refused = posted(address, "/make", settings="references=0.5")
    assert refused.startswith("<p>Error: merging: references: expected a model whose reference")
    assert posted(address, "/progress") == "<p>image 0 of 2 done</p>", "before the first image"
    for values, error in (
        ({"settings": "keep=7"}, "keep: expected a share above 0 and at most 1, got 7"),
        ({"settings": "<b>"}, "expected settings such as keep=0.4,fit_queries=32, got &#x27;&lt;"),
        ({"steps": "0"}, "--steps: expected at least 1, got 0"),
        ({"prompt": ""}, "expected a prompt, got an empty one"),
        ({"settings": "tau=0.5,min_tokens=999"}, "fewer than min_tokens=999"),
    ):
        assert error in posted(address, "/make", **values)
    with ThreadPoolExecutor() as pool:
        long = pool.submit(posted, address, "/make", steps="999")
        while "of 999 done" not in posted(address, "/progress"):
            pass
        posted(address, "/stop")
        assert long.result() == "<p>Stopped</p>"
    with pytest.raises(OSError, match="400"), urlopen(Request(address + "/stop", b"{}")):
        pass
