"""Choose the prompts of a benchmark: those of a file, or drawn ones. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from mame_sd.cli.groups import PromptOptions
from mame_sd.errors import UserError
from mame_sd.runs.prompt_files import Prompt, load_prompts, prompt_file_identity

from ..benchmark.prompts import CAPTIONS, TUNED_ON, drawn
from ..benchmark.suites import Suite


def prompts_of_file(suite: Suite, prompts: PromptOptions, held_out: bool) -> list[Prompt] | None:
    """Return the prompts of a suite's or a given file, or None if prompts are drawn.

    Args:
        suite: the suite.
        prompts: the options for prompts.
        held_out: if True, prompts must be drawn.

    Raises:
        UserError: the suite has no prompts, and none are given; or a file is given where prompts
            must be drawn, or can't be read.
    """
    source = prompts.file or suite.prompts
    if source is None:
        raise UserError(
            f"--suite {suite.name}: expected --prompts FILE, got none; .txt, .csv and .tsv files"
            " will do (the paper's are of GEMRec and ImageNet's class names)"
        )
    if source == "drawn":
        return None
    if held_out:
        raise UserError(f"--held-out: expected prompts that are drawn, got {source}; drop one")
    return load_prompts(source)


def suite_prompts(
    suite: Suite, prompts: PromptOptions, embedded: str | None = None, held_out: bool = False
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the prompts of a suite, or of a given file, and what the manifest tells of them.

    Args:
        suite: the suite.
        prompts: the options for prompts.
        embedded: name of the embedded model whose prompts are drawn. For others, the UNet's are.
        held_out: if True, other prompts are drawn than those that defaults were chosen on.

    Raises:
        UserError: see `prompts_of_file`.
    """
    count = suite.num if prompts.num is None else prompts.num
    read = prompts_of_file(suite, prompts, held_out)
    if read is not None:
        return read[:count], prompt_file_identity(prompts.file or suite.prompts or "")
    captions, seed = CAPTIONS.get(embedded or "", CAPTIONS["unet"])(), suite.seed
    without: set[str] = set()
    if held_out:
        without = {prompt.text for prompt in drawn(captions, min(count, TUNED_ON), seed)}
        seed += 1
    found = drawn(captions, count, seed, without)
    return found, {"name": f"drawn with seed {seed}", "sha256": None}
