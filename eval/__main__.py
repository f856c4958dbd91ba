"""``python -m eval`` in a checkout is ``mame-sd-eval``."""

from .cli import main

if __name__ == "__main__":
    main()
