"""``python -m mame_sd`` is ``mame-sd``."""

from mame_sd.cli import main

if __name__ == "__main__":
    main()
