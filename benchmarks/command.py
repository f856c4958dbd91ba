"""How a benchmark's command ends: bad input and a failure of the machine are one line each."""

from __future__ import annotations

import sys
from collections.abc import Callable

from mame_sd.errors import MachineError, UserError


def run(main: Callable[[], None]) -> None:
    """Runs `main`; exit codes are those of the other commands: 2 bad input, 1 the machine."""
    try:
        main()
    except (UserError, MachineError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
