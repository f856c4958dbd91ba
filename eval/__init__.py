"""Evaluation of merged models: metrics, benchmark suites and a report. Never imported by `mame_sd` itself.

In a checkout ``python -m eval``, installed ``mame-sd-eval`` or ``python -m mame_sd.eval``.
"""

PROGRAM = "mame-sd-eval"
