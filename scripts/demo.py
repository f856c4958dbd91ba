"""The main job: paint the demo prompts with and without merging, and lay them side by side.

python scripts/demo.py --out out/demo       # what `make demo` runs; continues where it was stopped
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from PIL import Image

from mame_sd.sheet import Cell, draw_sheet


def generate(out: Path, *options: str) -> list[dict]:
    """Run `mame-sd generate` on the demo prompts and return its samples, in prompt order."""
    command = [sys.executable, "-m", "mame_sd", "generate", "--prompts", "demo", "--out", str(out), *options]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    return sorted(samples, key=lambda sample: sample["id"])


def cells(run: Path, samples: list[dict], method: str) -> list[Cell]:
    return [
        Cell(
            Image.open(run / sample["file"]).convert("RGB"), (sample["prompt"], f"{method}, {sample['seconds']:.1f} s")
        )
        for sample in samples
    ]


def seconds(samples: list[dict]) -> float:
    return sorted(s["seconds"] for s in samples)[len(samples) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--columns", type=int, default=6)
    args = parser.parse_args()
    baseline = generate(args.out / "baseline", "--baseline")
    merged = generate(args.out / "mame")
    above, below = cells(args.out / "baseline", baseline, "baseline"), cells(args.out / "mame", merged, "merged")
    rows = [row[i : i + args.columns] for i in range(0, len(above), args.columns) for row in (above, below)]
    title = f"median seconds per image: baseline {seconds(baseline):.1f}, merged {seconds(merged):.1f}"
    draw_sheet(rows, title).save(args.out / "sheet.png")
    print(f"images in {args.out}/baseline and {args.out}/mame; side by side: {args.out}/sheet.png")


if __name__ == "__main__":
    main()
