"""``mame-sd-eval``, ``python -m mame_sd.eval``, and ``python -m eval`` in a checkout.

Everything is imported as late as can be, so that Ctrl-C while libraries load ends without a traceback too.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    try:
        from mame_sd.cli_errors import exit_status

        status = exit_status(_run)
    except KeyboardInterrupt:  # before exit_status was there to say so
        status = 130
    sys.exit(status)


def _run() -> object:
    from .cli import invoke

    return invoke()


if __name__ == "__main__":
    main()
