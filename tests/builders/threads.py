"""Work in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_thread(work: Callable[[], None]) -> None:
    """Does it, and waits for its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
