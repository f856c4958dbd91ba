"""What a benchmark is of: what is known before anything is measured."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mame_sd.diffusion.apply_denoiser import denoiser_of
from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.processes import Process
from mame_sd.runs.prompt_files import Prompt, prompts_digest

from ..metric_list import Metric
from ..results.schema import NOT_YET, Picture, Results
from ..results.schema import Row as Line
from ..scoring.reference import Reference
from ..scoring.tools import Tools
from .rows import Row
from .suites import Suite


@dataclass(kw_only=True)
class Setup:
    """Everything that decides a benchmark's figures.

    Attributes:
        rows: the first is the baseline.
        reference: what quality is measured against; None: distances are withheld.
        process: this process among several, which must have joined one another.
        prompt_file: name and digest of the prompt file, for the manifest.
        command: what makes it again, for the report.
    """

    suite: Suite
    model: LoadedModel
    prompts: Sequence[Prompt]
    settings: GenerateSettings
    rows: Sequence[Row]
    metrics: Sequence[Metric]
    reference: Reference | None
    out: Path
    tools: Tools
    rounds: int
    prompt_file: dict[str, Any] | None = None
    command: str = ""
    process: Process = field(default_factory=Process)

    def __post_init__(self) -> None:
        self.rows = [row.on(self.model) for row in self.rows]

    def results_before(self) -> Results:
        """What is known before anything is measured."""
        rows = [
            Line(
                name=row.name,
                label=row.label,
                family=row.family,
                default=row.default,
                config=row.config,
                run=f"runs/{row.name}",
                reason=row.lacking or NOT_YET,
            )
            for row in self.rows
        ]
        jobs = jobs_of(self.prompts, self.settings)
        about = {} if self.reference is None else self.reference.about()
        return Results(
            suite=self.suite.name,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            manifest=self.manifest(),
            metrics=list(self.metrics),
            rows=rows,
            pictures=[Picture(job.name, job.prompt.text, job.seed) for job in jobs],
            reference=about.get("name"),
            reference_n=about.get("n"),
            notes=[f"{self.suite.about} Here: {self._words()}."],
        )

    def _words(self) -> str:
        """What was really generated, whatever the suite's own settings are."""
        file, settings = self.prompt_file or {}, self.settings
        prompts = f"{len(self.prompts)} prompts" + (
            f" ({file['name']})" if file.get("name") else ""
        )
        steps = f"{settings.steps} step" + "s" * (settings.steps != 1)
        return f"{prompts}, {steps}, seed {settings.seed}, model {self.model.identity['name']}"

    def manifest(self) -> dict[str, Any]:
        """What the figures depend on."""
        processors = getattr(denoiser_of(self.model.pipe), "attn_processors", {})
        return {
            "suite": self.suite.name,
            "command": self.command,
            "model": dict(self.model.identity),
            "sampling": {
                **asdict(self.settings),
                "guidance": self.model.guidance
                if self.settings.guidance is None
                else self.settings.guidance,
            },
            "prompts": {
                "count": len(self.prompts),
                "sha256": prompts_digest(self.prompts),
                "file": self.prompt_file or {},
            },
            "environment": {**environment(self.model), "processes": self.process.count},
            "attention": sorted({type(processor).__name__ for processor in processors.values()}),
            "latency": {
                "rounds": self.rounds,
                "batch": self.settings.batch_size,
                "prompts": "another batch each round",
            },
            "methods": {row.name: row.config for row in self.rows},
            "reference": None if self.reference is None else self.reference.about(),
            "networks": {},
        }
