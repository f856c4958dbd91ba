"""ComfyUI's server with a clone of the repository in custom_nodes: the example workflow runs over
HTTP, and bad values are refused.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comfyui.engine import CHECKOUT, needs_engine

pytestmark = needs_engine
ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "comfyui" / "example_workflows" / "mame_token_merging.json"


class Server:
    """A running ComfyUI; its log is read line by line."""

    def __init__(self, base: Path) -> None:
        self.base = base
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = [
            "--cpu",
            "--base-directory",
            str(base),
            "--listen",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        command = [sys.executable, "-u", "main.py", *options, "--disable-auto-launch"]
        self.process = subprocess.Popen(
            command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def until(self, text: str) -> list[str]:
        """The lines up to the first that holds `text`."""
        lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line.strip())
            if text in line:
                return lines
        raise AssertionError(f"the server ended before it said {text!r}:\n" + "\n".join(lines))

    def ask(self, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("comfyui")
    (base / "models" / "checkpoints").mkdir(parents=True)
    clone = base / "custom_nodes" / "mame-sd"
    for part in ("comfyui", "mame_sd"):
        shutil.copytree(ROOT / part, clone / part)
    for part in ("__init__.py", "pyproject.toml"):
        shutil.copy(ROOT / part, clone / part)
    shutil.copy(Path(__file__).parent / "tiny_checkpoint.py", base / "custom_nodes")
    running = Server(base)
    running.until("To see the GUI go to")
    yield running
    running.process.terminate()
    running.process.communicate()


def prompt_of(workflow: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """What the frontend sends for a workflow: inputs by name, from links and, in the order of the
    node's inputs, widgets.
    """
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        links = {one["name"]: sources[one["link"]] for one in node["inputs"]}
        widgets = iter(node["widgets_values"])
        inputs: dict[str, Any] = {}
        every = kinds[node["type"]]["input"]
        for name, (_, *options) in {**every["required"], **every.get("optional", {})}.items():
            inputs[name] = links[name] if name in links else next(widgets)
            if options and options[0].get("control_after_generate"):
                next(widgets)
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


@pytest.fixture(scope="module")
def prompt(server: Server) -> dict[str, Any]:
    """The example workflow, with the tiny checkpoint and few steps."""
    made = prompt_of(json.loads(WORKFLOW.read_text(encoding="utf-8")), server.ask("/object_info"))
    change(made, "CheckpointLoaderSimple", ckpt_name="tiny.safetensors")
    change(made, "KSampler", steps=2)
    return made


def change(prompt: dict[str, Any], kind: str, **inputs: Any) -> None:
    next(node for node in prompt.values() if node["class_type"] == kind)["inputs"].update(inputs)


def test_the_node_is_listed(server: Server) -> None:
    found = server.ask("/object_info/MaMeModelPatch")["MaMeModelPatch"]
    assert (found["display_name"], found["category"]) == ("MaMe token merging", "model/patch")
    assert found["python_module"] == "custom_nodes.mame-sd"


def test_the_example_workflow_runs_and_says_what_merged(
    server: Server, prompt: dict[str, Any]
) -> None:
    answer = server.ask("/prompt", {"prompt": prompt})
    assert answer["node_errors"] == {}
    lines = server.until("Prompt executed in")
    assert any(
        line.endswith("MaMe merged 1024 -> 256 keys at 32 x 32, 4096 -> 1024 keys at 64 x 64")
        for line in lines
    )
    done = server.ask(f"/history/{answer['prompt_id']}")[answer["prompt_id"]]
    assert done["status"]["status_str"] == "success"
    assert done["outputs"]["8"]["images"]


def test_a_file_in_the_input_folder_gives_each_layer_its_settings(
    server: Server, prompt: dict[str, Any]
) -> None:
    """And one for another model is an error that names both."""
    rules = {"down_blocks.0": {"keep": 0.5}, "up_blocks.1": {"keep": 0.125}}
    model = "UNet2DConditionModel with 7 self-attentions"
    for made_for, status in ((model, "success"), ("another", "error")):
        table = {"keep": 0.25, "layers": rules, "made_for": made_for}
        (server.base / "input" / f"{status}.json").write_text(json.dumps(table), encoding="utf-8")
        given = json.loads(json.dumps(prompt))
        change(given, "KSampler", steps=1, seed=2)
        change(given, "MaMeModelPatch", settings=f"{status}.json")
        answer = server.ask("/prompt", {"prompt": given})
        assert answer["node_errors"] == {}
        lines = server.until("Prompt executed in")
        done = server.ask(f"/history/{answer['prompt_id']}")[answer["prompt_id"]]
        assert done["status"]["status_str"] == status
        said = "\n".join(lines)
        if status == "success":
            merged = "1024 -> 256 keys at 32 x 32, 4096 -> 2048 keys at 64 x 64"
            assert f"MaMe merged {merged}, 4096 -> 512 keys at 64 x 64" in said
        else:
            assert f"expected settings that were found for {model}, got ones for another" in said


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"settings": "none.json"}, "expected a .json file of settings"),
        ({"keep": 0.0}, "smaller than min of 0.01"),
        ({"tau": -2.0}, "smaller than min of -1.0"),
        ({"mode": "x"}, "not in"),
    ],
)
def test_bad_values_are_refused_before_anything_runs(
    server: Server, prompt: dict[str, Any], inputs: dict[str, Any], message: str
) -> None:
    bad = json.loads(json.dumps(prompt))
    change(bad, "MaMeModelPatch", **inputs)
    assert message in json.dumps(server.ask("/prompt", {"prompt": bad})["node_errors"])
