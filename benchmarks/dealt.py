"""What a file of settings by layer is worth beside the same forms in other places.

    python -m benchmarks.dealt out/tune/config.json --out out/dealt
    python -m benchmarks.frontier --only default --settings out/tune/config.json out/dealt/*.json

Writes files of settings with the very same forms. They are dealt at random (`random-0` and on), the
strongest in the first layers (`early`), and the strongest in the last (`late`). All layers of such
a model have as many tokens, so each of these files costs what the calibrated one costs. A
calibration that finds nothing loses to them as often as it wins.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.runs.files import write_atomically


def dealt(rules: dict[str, Any], num: int) -> dict[str, dict[str, Any]]:
    """The rules of a file dealt to its layers in other ways, by name; `rules` are in the order of
    the layers.
    """
    layers, forms = list(rules), list(rules.values())
    by_share = sorted(
        forms,
        key=lambda form: 1.0 if form is False else form["keep"] + 0.01 * (form["merge"] == "kv"),
    )
    rows = {"early": by_share, "late": by_share[::-1]}
    for seed in range(num):
        rows[f"random-{seed}"] = random.Random(seed).sample(forms, len(forms))
    return {name: dict(zip(layers, order, strict=True)) for name, order in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a file that calibration wrote")
    parser.add_argument(
        "--out", type=Path, default=Path("out/dealt"), help="folder (default out/dealt)"
    )
    parser.add_argument(
        "--num", type=int, default=2, help="dealt at random so many times (default 2)"
    )
    args = parser.parse_args()
    try:
        config = MaMeConfig.from_file(args.file)
    except ValueError as error:
        parser.error(str(error))
    if not config.layers:
        parser.error(
            f"{args.file}: expected settings by layer, got none; give a file of mame-sd tune"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rules in dealt(config.layers.to_dict(), args.num).items():
        changed = config.replace(layers=rules).to_dict(given_only=True)
        write_atomically(args.out / f"{name}.json", json.dumps(changed, indent=1).encode())
        print(args.out / f"{name}.json")


if __name__ == "__main__":
    main()
