"""Serve a page on this machine: a prompt and settings in, unmerged and merged images out."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mame_sd.cli.compare import Way, compare
from mame_sd.cli.console import answer, doing
from mame_sd.cli.errors import describe
from mame_sd.cli.sheet import DIFFERENCE_SCALE, difference_map
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import prompts_from_texts


class Server(ThreadingHTTPServer):
    """The page's server, which makes the images of one request at a time."""

    model: LoadedModel
    settings: GenerateSettings
    page, progress, stopped = "", "", False
    lock = threading.Lock()

    def tell(self, noun: str, done: int, total: int) -> None:
        """Keep how many images or steps (`noun`) are done, or raise UserError after Stop."""
        self.progress = f"<p>{noun} {done} of {total} done</p>"
        if self.stopped:
            raise UserError("stopped")

    def images(self, values: dict[str, str]) -> str:
        """Return HTML with the images for the values of the page's form."""
        steps, seed = int(values["steps"]), int(values["seed"])
        settings = replace(self.settings, steps=steps, seed=seed)
        ways = [Way("merged", MaMeConfig.from_text(values["settings"]))]
        on_image, on_step = (partial(self.tell, noun) for noun in ("image", "step"))
        (prompt,) = prompts_from_texts([values["prompt"]])
        first, merged = compare(self.model, prompt, settings, ways, on_image, on_step)
        _, nearness, *kept = merged.lines(first)
        text, gap = f"<p>{'; '.join(kept)}</p>", difference_map(first.image, merged.image)
        shown = [(panel.image, panel.heading, panel.label) for panel in (first, merged)]
        shown.append((gap, nearness, f"difference, darkest at {DIFFERENCE_SCALE} of 255 levels"))
        for image, heading, label in shown:
            image.save(buffer := io.BytesIO(), "PNG")
            url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
            text += f'<figure><img alt="{label}" src="{url}"><b>{heading}</b>{label}</figure>'
        return text


class Handler(BaseHTTPRequestHandler):
    """Answer one request with HTML: GET the page, POST images or their progress, or stop."""

    server: Server

    def do_GET(self) -> None:
        """Send the page."""
        self._send(self.server.page)

    def do_POST(self) -> None:
        """Make images or stop making them, and send them or how far they are."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Type"] != "application/json":  # other sites can't send it
            self.send_error(400)
        elif self.path == "/make":
            with self.server.lock:
                self.server.stopped = False
                try:
                    self._send(self.server.images(json.loads(body)))
                except Exception as error:
                    said = str(error) if isinstance(error, ValueError) else describe(error)[1]
                    said = "Stopped" if self.server.stopped else f"Error: {html.escape(said)}"
                    self._send(f"<p>{said}</p>")
        else:
            self.server.stopped |= self.path == "/stop"
            self._send(self.server.progress)

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def run_ui(port: int, choice: ModelChoice, settings: GenerateSettings) -> None:
    """Load the model and serve the page until Ctrl-C.

    Args:
        port: port on this machine. If 0, the system picks a free one.
        choice: the model.
        settings: how images are sampled; the page replaces steps and seed.

    Raises:
        UserError: the port can't be used.
    """
    try:
        server = Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: can't be used ({error.strerror}); take another") from None
    with doing(f"loading {choice.model}"):
        server.model, server.settings = load_model(choice), settings
    page = Path(__file__).with_name("ui.html").read_text(encoding="utf-8")
    page = page.replace("STEPS", str(settings.steps))
    server.page = page.replace("MODEL", html.escape(choice.name))
    address = f"http://127.0.0.1:{server.server_port}"
    answer(f"{address} (Ctrl-C ends it)", {"address": address})
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        os._exit(0)  # a thread that makes an image would hold up the usual way out
