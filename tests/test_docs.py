"""The pages hold: their examples run, their links lead somewhere, and their commands exist."""

import json
import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.main import get_command

import mame_sd
from mame_sd.cli.app import app
from mame_sd.config import MaMeConfig
from mame_sd.diffusion.families.family import REGISTERED
from mame_sd.eval.benchmark import rows as benchmark_rows
from mame_sd.eval.caches import rows as cache_rows
from mame_sd.eval.captions import rows as caption_rows
from mame_sd.eval.cli.app import app as evaluation
from mame_sd.eval.perception import rows as classify_rows
from mame_sd.eval.tables import named
from mame_sd.families import Family
from tests.builders.tiny import tiny_pipeline, tiny_unet
from tests.settings_page import page

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
USAGE = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
EXAMPLES, OF_USAGE = (
    re.findall(r"<!-- test: python -->\n```python\n(.*?)```", page, re.S)
    for page in (README, USAGE)
)
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
CELLS = [
    cell
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]
COMMANDS = [
    line
    for text in (README, *(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md")))
    for line in re.findall(r"^(?:    )?(mame-sd(?:-eval)? .*?)(?:  #.*)?$", text, re.M)
]
ROWS = {
    "benchmark": lambda names, suite: benchmark_rows.chosen_rows(names),
    "cache": lambda names, suite: named(names, cache_rows.all_rows()),
    "caption": lambda names, suite: caption_rows.chosen_rows(names),
    "classify": lambda names, suite: classify_rows.chosen_rows(suite, names),
}


def test_the_page_of_settings_is_current() -> None:
    committed = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert committed == page(), "run: python -m tests.settings_page > docs/settings.md"


def test_every_command_and_option_has_help() -> None:
    for each in (app, evaluation):
        for name, command in get_command(each).commands.items():  # type: ignore[attr-defined]
            assert command.help, name
            for parameter in command.params:
                said = getattr(parameter, "help", None)
                assert said or parameter.param_type_name == "argument", f"{name} {parameter.name}"


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[-1][:40])
def test_python_examples_run_and_warn_of_nothing(
    code: str, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ran(code)["image"].size == (256, 256)
    hidden = (DeprecationWarning, PendingDeprecationWarning)  # which Python shows to no user
    assert [str(w.message) for w in recwarn if not issubclass(w.category, hidden)] == []
    said = capfd.readouterr().err.replace("\r", "\n").splitlines()
    assert [line for line in said if line.strip() and "%|" not in line] == [], "bars alone"


def small() -> Any:
    """Make a tiny pipeline whose first level has 1,024 tokens, as the embedded one has."""
    pipe = tiny_pipeline()
    pipe.register_modules(unet=tiny_unet(sample_size=32))
    return pipe


def ran(code: str, **scope: Any) -> dict[str, Any]:
    """Return the names that code leaves."""
    exec(compile(code, "example", "exec"), scope)
    return scope


def test_examples_of_usage_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mame_sd, "embedded_pipeline", small)
    *pipelines, family = OF_USAGE
    first, half_of_the_steps, cached = map(ran, pipelines)
    assert all(scope["image"].size == (64, 64) for scope in (first, half_of_the_steps, cached))
    assert half_of_the_steps["handle"].active is False
    assert half_of_the_steps["handle"].report().layers
    layers = cached["handle"].report().layers
    assert {layer.calls for layer in layers if layer.merged} == {2, 4}
    ran(family)
    assert "MyTransformer2DModel" in REGISTERED
    settings = {field.name for kind in (MaMeConfig, Family) for field in fields(kind)}
    assert set(re.findall(r"`(\w+)=", USAGE)) <= settings


def test_the_notebook_runs_and_shows_one_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    """With a tiny model of 1,024 tokens; CI runs the notebook as it is."""
    code = "\n".join("".join(cell["source"]) for cell in CELLS)
    assert "PUBLISHED = False" in code
    scope = ran(code.replace('embedded_pipeline("transformer")', "pipe"), pipe=small())
    printed = capsys.readouterr().out
    assert "layers merge" in printed
    assert printed.count(" dB") == 4
    assert len(scope["images"]) == 5
    assert NOTEBOOK.stat().st_size < 200_000
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert {output.get("name", "result") for output in outputs} == {"stdout", "result"}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    """With rows that exist."""
    program, *words = shlex.split(line)
    command = get_command({"mame-sd": app, "mame-sd-eval": evaluation}[program])
    assert isinstance(command, typer.core.TyperGroup)
    context = command.make_context(program, words[:1], resilient_parsing=True)
    sub = command.get_command(context, words[0])
    assert sub is not None, f"no command {words[0]}"
    given = sub.make_context(words[0], words[1:]).params
    if given.get("rows"):
        assert ROWS[words[0]](given["rows"], given.get("suite"))


def test_modules_and_scripts_of_every_page_have_the_options_it_gives() -> None:
    found = 0
    for text in (
        README,
        *(file.read_text(encoding="utf-8") for file in (ROOT / "docs").rglob("*.md")),
    ):
        wrapped = r"`(?:[^`\n]|\n {0,3}(?=[^\s`]))+`"
        text = re.sub(wrapped, lambda code: " ".join(code[0].split()), text)
        text = re.sub(r"git checkout \w+ && python [^`\n]+", "", text)  # of what was measured once
        for line in re.findall(r"python (?:-m )?((?:benchmarks\.|scripts[./])[^`\n]+)", text):
            target, *words = shlex.split(line)
            source = ROOT / (target if "/" in target else target.replace(".", "/") + ".py")
            source = source if source.exists() else source.with_suffix("") / "__main__.py"
            code = source.read_text(encoding="utf-8")
            for shared in re.findall(r"from (scripts\.robustness\.\w+) import", code):
                code += (ROOT / (shared.replace(".", "/") + ".py")).read_text(encoding="utf-8")
            if "import Recipe" in code:  # a training, whose command is recipe.py's
                code += (source.parent / "recipe.py").read_text(encoding="utf-8")
            options = set(re.findall(r'"(--[\w-]+)"', code))
            assert {word for word in words if word.startswith("--")} <= options, line
            found += 1
    assert found > 10


def test_links_of_pages_lead_somewhere() -> None:
    for file in (
        *ROOT.glob("*.md"),
        *(ROOT / "comfyui").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ):
        text = file.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(#[\w-]+)?\)", text):
            place = (file.parent / target) if target else file
            assert place.exists(), f"{file.name}: {target}"
            if anchor and place.suffix == ".md":
                assert anchor[1:] in _anchors(place), f"{file.name}: {target}{anchor}"


def test_files_and_names_of_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = [one for one in ROOT.iterdir() if one.is_dir() and one.name[0] != "."]
    files = [path for one in folders if one.name != "out" for path in (one, *one.rglob("*"))]
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for path in files]
    named = r"[\w/]+\.py\b|[\w/]+/(?=[`)])"
    for place in re.findall(named, text):
        assert any(path.endswith(f"/{place.rstrip('/')}") for path in paths), place
    code = "".join(path.read_text("utf-8") for path in files if path.suffix == ".py")
    written = r"\b(?:[A-Z]+[a-z]+[A-Z]\w*|[a-z]+_[a-z_]+|[A-Z]+_[A-Z]+)\b"
    names = set(re.findall(written, re.sub(named, "", text))) - {"ComfyUI", "LLaVA", "mame_sd"}
    assert len(names) > 15
    for name in names:
        assert re.search(rf"^\s*(?:class |def )?{name}\b", code, re.M), name


def _anchors(page: Path) -> set[str]:
    """Return the ends of links to headings of the page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_idea_is_drawn_in_four_panels_and_a_rival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = tmp_path / "idea.png"
    picture = str(ROOT / "prompts" / "demo.png")
    monkeypatch.setattr("sys.argv", ["idea.py", picture, str(drawn)])
    errors = runpy.run_path(str(ROOT / "examples" / "idea.py"))
    with Image.open(drawn) as sheet:
        assert sheet.width == 5 * (errors["SIDE"] + 8)
    x, cells = errors["x"], errors["make_cells"]((errors["GRID"],) * 2, 0.25)
    merged = errors["group_tokens"](x.index_select(1, cells.order), cells)
    restored = merged.restore(merged.merge(x))
    apart = (restored - x).square().mean().sqrt().item()
    assert apart < errors["error"], "nearer than groups by position, of as many tokens"


def test_readme_names_and_counts_denoisers_as_the_matrix_does() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    ((classes, merge),) = re.findall(r"^(\d+) classes: (\d+) merge,", page, re.M)
    assert f"{merge} of diffusers' {classes} denoisers" in README
    (names,) = re.findall(r"denoisers merge. Among them are ([^.(]*) \(", README)
    for name in " ".join(names.split()).split(", "):
        assert f"\n| {name} | " in page, name


def test_the_default_is_estimated_to_lose_on_no_card() -> None:
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    gains = page.partition("## What the default gains")[2].partition("\n## ")[0]
    row = r"^\| ([^|]+) \| [^|]+ " + r"\| ([\d./ ]+) " * 5 + r"\|$"
    lines = re.findall(row, gains, re.M)
    assert len(lines) >= 8
    for name, *cells in lines:
        assert min(float(figure) for cell in cells for figure in cell.split("/")) >= 1, name
