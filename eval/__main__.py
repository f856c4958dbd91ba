"""Run ``mame-sd-eval``, also as ``python -m mame_sd.eval``."""

from __future__ import annotations

from mame_sd.__main__ import main as run


def main() -> None:
    """Run the console script."""
    run("mame_sd.eval.cli.app")


if __name__ == "__main__":
    main()
