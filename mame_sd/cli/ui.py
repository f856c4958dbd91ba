"""``mame-sd ui``: a page in the browser that shows a prompt's image with and without merging, side
by side.

Built with gradio, an optional extra. The page is served on this machine, fetches nothing from
elsewhere, and one image is computed at a time.
"""

from __future__ import annotations

import time
from typing import Any

from PIL import Image

from mame_sd.cli.console import say
from mame_sd.cli.difference import nearness
from mame_sd.cli.errors import describe
from mame_sd.cli.sheet import enlarge
from mame_sd.cli.show_merge import capture_merge, mean_colors, prompt_to_draw
from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.sampling import sample

SIDE = 512  # pixels of a shown image
FONTS = {
    "font": ["system-ui", "sans-serif"],
    "font_mono": ["ui-monospace", "monospace"],
}  # no web fonts


class SideBySide:
    """A prompt's image without merging and with it.

    Keeps the latest baseline, so that moving a slider costs one image, not two.

    Args:
        model: the model to generate with.
        base: the settings that the slider changes `keep` of.
    """

    def __init__(self, model: LoadedModel, base: MaMeConfig) -> None:
        self._model = model
        self._base = base
        self._baseline: tuple[tuple[str, GenerateSettings], Image.Image, float] | None = None

    @property
    def about(self) -> str:
        """The model, the size of its images and the guidance, for the top of the page."""
        try:
            height, width = self._model.default_size
            size = f", {width} x {height} pixels"
        except UserError:
            size = ""
        guidance = "" if self._model.guidance is None else f", guidance {self._model.guidance:g}"
        identity = self._model.identity
        return (
            f"{identity['name']} ({identity['pipeline']}){size}{guidance}, {identity['dtype']} on"
            f" {identity['device']}"
        )

    def warm_up(self) -> None:
        """One step of an image, so that the first seconds shown are not those of starting up."""
        self._plain("warm-up", GenerateSettings(steps=1))

    def generate(
        self, prompt: str, keep: float, steps: float, seed: float | None, step: float
    ) -> tuple[Image.Image, Image.Image, Image.Image, str]:
        """Baseline, merged image, merge map at `step`, and a table of seconds and tokens.

        Raises:
            UserError, MachineError: what the command line would say.
        """
        settings = GenerateSettings(steps=_integer("Steps", steps), seed=_integer("Seed", seed))
        step = min(_integer("Step of the merge map", step), settings.steps)
        try:
            config = self._base.replace(keep=keep)
        except ValueError as error:
            raise UserError(str(error)) from None
        plain, plain_seconds = self._plain(prompt, settings)
        start = time.perf_counter()
        found = capture_merge(self._model, prompt, settings, config, step)
        seconds = time.perf_counter() - start
        total, kept = found.owners.size, found.tokens_kept
        shown = enlarge(found.image, SIDE)
        rows = [
            ("", "baseline", "merged"),
            ("---", "---", "---"),
            ("seconds", f"{plain_seconds:.2f}", f"{seconds:.2f} ({plain_seconds / seconds:.2f} x)"),
            (
                f"keys kept, largest level, step {found.step}",
                f"{total} of {total}",
                f"{kept} of {total} ({kept / total:.0%})",
            ),
            ("nearness to the baseline", "", nearness(plain, found.image)),
        ]
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        table += "\nThe merge map paints each group of tokens in its mean colour and outlines it.\n"
        return enlarge(plain, SIDE), shown, mean_colors(shown, found.owners), table

    def _plain(self, prompt: str, settings: GenerateSettings) -> tuple[Image.Image, float]:
        """The baseline and its seconds; the latest one is not computed again."""
        key = (prompt, settings)
        if self._baseline is None or self._baseline[0] != key:
            (job,) = jobs_of([prompt_to_draw(prompt)], settings)
            start = time.perf_counter()
            (image,) = sample(self._model, settings, [job])
            self._baseline = key, image, time.perf_counter() - start
        return self._baseline[1:]


def _integer(field: str, value: float | None) -> int:
    """The number in a field of the page. Raises UserError unless it is a whole one."""
    if value is None or not float(value).is_integer():
        got = "an empty field" if value is None else f"{value:g}"
        raise UserError(f"{field}: expected a whole number, got {got}; give one, such as 1")
    return int(value)


def build_page(both: SideBySide, prompt: str = "") -> Any:
    """The page, a gradio Blocks. Raises MachineError when gradio is not installed."""
    gradio = load_gradio()

    def generate(*values: Any) -> Any:
        try:
            return both.generate(*values)
        except (UserError, MachineError) as error:
            message = str(error)
        except Exception as error:  # shown on the page, and in one line where the page is served
            _, message = describe(error)
            say(f"error: {message}")
        # An image of another setting would mislead beside an error.
        return *[None] * len(shown), f"**{message}**"

    with gradio.Blocks(title="mame-sd", analytics_enabled=False) as page:
        gradio.Markdown(
            f"# mame-sd\nThe same noise, denoised without merging and with it.\n\n{both.about}"
        )
        with gradio.Row():
            text = gradio.Textbox(prompt, label="Prompt", scale=4, autofocus=True)
            button = gradio.Button("Generate", variant="primary", scale=1)
        with gradio.Row():
            keep = gradio.Slider(0.05, 1, MaMeConfig().keep, step=0.005, label="keep")
            steps = gradio.Slider(1, 50, 20, step=1, label="Steps")
            seed = gradio.Number(0, label="Seed", minimum=0)
            step = gradio.Slider(1, 50, 10, step=1, label="Step of the merge map")
        with gradio.Row():
            shown = [
                gradio.Image(
                    label=label, interactive=False, format="png", buttons=["download", "fullscreen"]
                )
                for label in ("Baseline", "Merged", "Merge map")
            ]
        table = gradio.Markdown()
        inputs, outputs = [text, keep, steps, seed, step], [*shown, table]
        gradio.on(
            [button.click, text.submit],
            generate,
            inputs,
            outputs,
            concurrency_limit=1,
            api_name="generate",
        )
    return page


def serve(both: SideBySide, host: str, port: int, prompt: str = "") -> Any:
    """Serve the page in the background and return it; its `local_url` is its address, `close()`
    ends it.

    Args:
        host: address to listen on; 127.0.0.1 is this machine alone.
        port: 0 takes a free one.

    Raises:
        UserError: an address or port that can't be had.
        MachineError: gradio is not installed.
    """
    page = build_page(both, prompt)
    theme = load_gradio().themes.Default(**FONTS)
    try:
        page.launch(
            server_name=host,
            server_port=port or None,
            prevent_thread_lock=True,
            quiet=True,
            theme=theme,
            footer_links=[],
        )
    except OSError as error:
        raise UserError(
            f"--port {port}: expected a port that is free on {host}, but {error}; choose another,"
            " or 0 for any"
        ) from error
    return page


def load_gradio() -> Any:
    """The module gradio. Raises MachineError when it is not installed."""
    try:
        import gradio
    except ModuleNotFoundError:
        raise MachineError(
            "expected gradio, which the page is built with, found none; pip install 'mame-sd[ui]'"
        ) from None
    return gradio
