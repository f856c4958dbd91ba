"""``mame-sd`` and ``python -m mame_sd``.

The command line is imported inside `exit_status`, so that Ctrl-C while libraries load, or a library that is missing or
broken, ends in one line too.
"""

from __future__ import annotations

import sys

from mame_sd.cli_errors import exit_status


def main() -> None:
    """The console script."""
    sys.exit(exit_status(_run))


def _run() -> int:
    from mame_sd.cli import run

    return run()


if __name__ == "__main__":
    main()
