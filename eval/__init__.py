"""Evaluate merged models: metrics, benchmark suites and a report.

The command is ``mame-sd-eval`` or ``python -m mame_sd.eval``. The package has that name alone, in a
checkout too.
"""

PROGRAM = "mame-sd-eval"

if __name__ == "eval":  # the folder of a checkout, of which each module would be loaded twice
    raise ImportError("expected the name mame_sd.eval, got eval; import mame_sd.eval", name="eval")
