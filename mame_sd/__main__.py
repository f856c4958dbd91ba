"""``mame-sd`` and ``python -m mame_sd``.

Everything is imported as late as possible, so that Ctrl-C while libraries load, or a broken
library, ends without a traceback too.
"""

from __future__ import annotations

import sys
from importlib import import_module


def main(commands: str = "mame_sd.cli.app") -> None:
    """Run `invoke` of the module `commands` and exit with its status (the console script)."""
    try:
        from mame_sd.cli.errors import exit_status

        status = exit_status(lambda: import_module(commands).invoke())
    except KeyboardInterrupt:  # before exit_status was imported
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
