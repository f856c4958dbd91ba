"""Evaluation of merged models: metrics, benchmark suites and a report.

``mame-sd-eval`` or ``python -m mame_sd.eval``. In a checkout too the package has that name alone.
"""

PROGRAM = "mame-sd-eval"

if __name__ == "eval":  # the folder of a checkout, of which each module would be loaded twice
    raise ImportError("expected the name mame_sd.eval, got eval; import mame_sd.eval", name="eval")
