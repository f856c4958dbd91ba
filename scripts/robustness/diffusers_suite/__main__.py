"""diffusers' own tests with merging in the loop: `make test-diffusers`, or

    python -m scripts.robustness.diffusers_suite [--suites "SD 3" Flux] [--modes on off]
        [--source CHECKOUT] [--work FOLDER]
    python -m scripts.robustness.diffusers_suite --pipelines   # their tiny pipelines (pipelines.py)

The tests are those of the installed diffusers, or of a checkout. The former come from its
repository at the tag of that version, for its source distribution has none. They run in one process
a suite and mode, with models that merge from the moment they are made (`plugin.py`). Stand-ins take
the place of what they would load from the hub. A test that does not pass with merging runs again
without it. Stopped at any moment, the same command goes on where it was. At the end counts and
differences go to tests/matrix/diffusers_suite.json, and docs/compatibility.md is written anew. Exit
status 1 where a test fails by merging that `known.py` does not explain.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import torch

from scripts.robustness.diffusers_suite.known import reason
from scripts.robustness.diffusers_suite.suites import (
    BACKENDS,
    COMPILED,
    GROUND,
    MODES,
    SUITES,
    runs,
)

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "tests" / "matrix" / "diffusers_suite.json"
PIPELINES = RESULT.with_name("diffusers_pipelines.json")
URL = "https://github.com/huggingface/diffusers"
# What diffusers' tests need beyond our own requirements.
NEEDS = ("ftfy", "parameterized", "requests-mock", "wcwidth")


def install(folder: Path, *packages: str) -> None:
    """Installs packages into `folder`, without what they require, if the first is not there.

    Raises SystemExit when they can't be had.
    """
    if (folder / packages[0].partition("=")[0]).is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    if subprocess.run([*command, str(folder), *packages]).returncode:
        raise SystemExit(
            f"expected to install {', '.join(packages)}, which diffusers' tests need; pip said"
            " why not"
        )


def torchvision_site(work: Path) -> Path:
    """A folder with the torchvision of the installed PyTorch, which some pipelines need.

    The suites run without it, as they did when they were counted.
    """
    major, minor = map(int, torch.__version__.split(".")[:2])
    assert major == 2
    install(work / "torchvision", f"torchvision==0.{minor + 15}.*")
    return work / "torchvision"


def fetched(work: Path, source: Path | None) -> tuple[Path, str]:
    """The folder that tests run in, with `tests/` of diffusers in it, and their version.

    Raises SystemExit when they can't be had.
    """
    version = diffusers.__version__
    if source is None:
        source = work / f"diffusers-{version}"
        if not (source / "tests").is_dir():
            command = f"git clone --quiet --depth 1 --branch v{version} {URL}".split()
            if subprocess.run([*command, str(source)]).returncode:
                raise SystemExit(
                    f"expected {URL} at v{version}, could not clone it; give a checkout by --source"
                )
    init = source / "src" / "diffusers" / "__init__.py"
    if not (source / "tests" / "pipelines").is_dir() or not init.is_file():
        raise SystemExit(
            f"--source {source}: expected a checkout of diffusers, with tests/pipelines and"
            " src/diffusers"
        )
    found = re.search(r'__version__ = "(.+)"', init.read_text(encoding="utf-8"))
    version = found[1] if found else "unknown"
    folder = work / f"tests-{version}"
    if not (folder / "tests").is_dir():
        # without src, so that the installed library is the one that is tested
        shutil.copytree(source / "tests", folder / "tests.part", dirs_exist_ok=True)
        (folder / "tests.part").rename(folder / "tests")
    # pytest would take our settings, under which their markers are unknown, from a folder above
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    install(work / "site", *NEEDS)
    return folder, version


def results_file(work: Path, version: str, suite: str, mode: str, backend: str | None) -> Path:
    name = re.sub(r"\W+", "-", suite if backend is None else f"{suite} {backend}")
    return work / f"results-{version}-{diffusers.__version__}" / mode / f"{name}.jsonl"


def run(
    folder: Path, work: Path, tests: list[str], mode: str, backend: str | None, results: Path
) -> None:
    """Runs those of `tests` (files, or single ones) that `results` has not yet."""
    results.parent.mkdir(parents=True, exist_ok=True)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:warnings"]
    options += ["-p", "scripts.robustness.diffusers_suite.plugin"]
    options += ["-m", "not compile" if backend is None else "compile"]
    environment = {
        **os.environ,
        "MAME_MODE": mode,
        "MAME_RESULTS": str(results),
        "MAME_BACKEND": backend or "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(work / "site")]),
    }
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with results.with_suffix(".log").open("a", encoding="utf-8") as log:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log)
    status = done.returncode
    if status not in (0, 1, 5):  # passed, failed, nothing left to run
        raise SystemExit(
            f"{results.stem}, {mode}: pytest stopped with status {status}; see"
            f" {results.with_suffix('.log')}"
        )


def run_pipelines(folder: Path, work: Path, results: Path) -> None:
    """Tries the tiny pipelines that `results` has not yet, and writes the record of all."""
    results.parent.mkdir(parents=True, exist_ok=True)
    folders = folder, ROOT, work / "site", torchvision_site(work)
    path = os.pathsep.join(map(str, folders))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", "scripts.robustness.diffusers_suite.pipelines"]
    if subprocess.run([*command, str(results)], cwd=folder, env=environment).returncode:
        raise SystemExit("the pipelines did not run to their end: the same command goes on")


def record_pipelines(results: Path) -> None:
    rows = sorted(lines_of(results), key=lambda line: (line["pipeline"], line["tests"]))
    PIPELINES.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def lines_of(results: Path) -> list[dict[str, Any]]:
    """What has run so far."""
    text = results.read_text(encoding="utf-8") if results.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def outcomes(results: Path) -> dict[str, dict[str, Any]]:
    """What has run so far, by test."""
    return {line["test"]: line for line in lines_of(results)}


def run_suite(
    folder: Path, work: Path, version: str, suite: str, mode: str, backend: str | None
) -> None:
    """Runs a suite in one mode, and again without merging what does not pass."""
    results = results_file(work, version, suite, mode, backend)
    if suite not in runs(mode) or results.with_suffix(".done").is_file():
        return
    paths = [path for path in SUITES[suite] if (folder / path).exists()]
    run(folder, work, paths, mode, backend, results)
    found = outcomes(results)
    failed = [test for test in found if found[test]["outcome"] != "passed"]
    if failed:
        ground = results_file(work, version, suite, GROUND[mode], backend)
        run(folder, work, failed, GROUND[mode], backend, ground)
    results.with_suffix(".done").touch()
    kinds = Counter(test["outcome"] for test in found.values())
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    print(f"{suite}, {backend or 'uncompiled'}, {mode}: {counts}", flush=True)


def compared(work: Path, version: str, suite: str, backend: str | None) -> dict[str, Any]:
    """Counts of one suite, by mode, and the tests that fail by merging; nothing of a mode that has
    not run to its end.
    """
    counts: dict[str, Any] = {}
    differences = []
    for mode, ground in GROUND.items():
        results = results_file(work, version, suite, mode, backend)
        if not results.with_suffix(".done").is_file():
            continue
        ours = outcomes(results)
        base = {**ours, **outcomes(results_file(work, version, suite, ground, backend))}
        passing = [name for name in ours if base[name]["outcome"] == "passed"]
        failing = [name for name in passing if ours[name]["outcome"] != "passed"]
        if passing:
            merged = sum(bool(ours[name].get("merged")) for name in passing)
            passed = len(passing) - len(failing)
            counts[mode] = {"ground": len(passing), "passed": passed, "merged": merged}
        for name in failing:
            of_one_run = r"/\S+/site-packages/|0x[0-9a-f]{6,}"
            error = re.sub(of_one_run, "", ours[name].get("error", ""))
            differences.append({"mode": mode, "test": name, "error": error})
    label = suite if backend is None else f"{suite}, torch.compile by {backend}"
    return {"suite": label, "counts": counts, "differences": differences}


def with_earlier(rows: list[dict[str, Any]], versions: dict[str, str]) -> list[dict[str, Any]]:
    """`rows`, and what was counted before with the same versions and not anew (in another work
    folder, say); without empty ones.
    """
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    same = known.get("versions") == versions
    earlier = {row["suite"]: row for row in known["suites"]} if same else {}
    for row in rows:
        old = earlier.get(row["suite"], {"counts": {}, "differences": []})
        kept = [item for item in old["differences"] if item["mode"] not in row["counts"]]
        row["differences"] = [*kept, *row["differences"]]
        counts = {**old["counts"], **row["counts"]}
        row["counts"] = {mode: counts[mode] for mode in GROUND if mode in counts}
    return [row for row in rows if row["counts"]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    many = {"nargs": "+", "metavar": "NAME"}
    add("--suites", choices=SUITES, default=list(SUITES), help=", ".join(SUITES), **many)
    modes = ", ".join(f"{mode}: {MODES[mode]}" for mode in GROUND)
    add("--modes", choices=GROUND, default=list(GROUND), help=modes, **many)
    add("--source", type=Path, help="a checkout of diffusers, instead of cloning its tag")
    add("--work", type=Path, default=ROOT / "out" / "diffusers_suite", help="cache and results")
    add("--table", action="store_true", help="run nothing, write the page from what there is")
    add("--pipelines", action="store_true", help="run the tiny pipelines instead of the tests")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    folder, version = fetched(work, arguments.source)
    tried = work / f"results-{version}-{diffusers.__version__}" / "pipelines.jsonl"
    if not arguments.table:
        from scripts.robustness.diffusers_suite.stand_ins import save_stand_ins

        save_stand_ins(folder)
        if arguments.pipelines:
            run_pipelines(folder, work, tried)
        for suite in [] if arguments.pipelines else arguments.suites:
            for backend in (None, *(BACKENDS if suite in COMPILED else ())):
                for mode in arguments.modes:
                    run_suite(folder, work, version, suite, mode, backend)
    rows = [
        compared(work, version, suite, backend) for suite in SUITES for backend in (None, *BACKENDS)
    ]
    versions = {"tests": version, "diffusers": diffusers.__version__}
    rows = with_earlier(rows, versions)
    RESULT.write_text(
        json.dumps({"versions": versions, "suites": rows}, indent=1) + "\n", encoding="utf-8"
    )
    if tried.is_file():
        record_pipelines(tried)
    from tests.matrix.table import page

    (ROOT / "docs" / "compatibility.md").write_text(page(), encoding="utf-8")
    unexplained = [item for row in rows for item in row["differences"] if not reason(**item)]
    for item in unexplained:
        print(f"{item['mode']}: {item['test']}: {item['error']}", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
