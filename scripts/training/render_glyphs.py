"""Render the embedded model's subjects, Noto Emoji glyphs, to one RGBA sheet with an index.

The SVGs come from the npm package ``@iconify-json/noto`` (Apache-2.0). Needs ``npm`` and ``pip
install resvg_py``.

    python -m scripts.training.render_glyphs

It writes glyphs.webp and glyphs.json into mame_sd/embedded/unet.
"""

import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import resvg_py
from PIL import Image

PACKAGE = "@iconify-json/noto@1.2.9"
CELL, GLYPH, COLUMNS = 256, 208, 16
ALIASES = {
    "tree": "deciduous-tree",
    "heart suit": "heart-suit",
    "car": "automobile",
    "lion": "lion",
}
NAMES = """
rocket, red apple, dog face, cat face, ant, key, star, red heart, pizza, tree,
balloon, baseball, basketball, bullseye, christmas tree, crystal ball, game die,
jack-o-lantern, kite, party popper, pool 8 ball, puzzle piece, soccer ball, tennis, trophy,
wrapped gift, video game, artist palette, boxing glove, teddy bear,
badger, bat, bear, beetle, bird, blowfish, bouquet, butterfly, cactus, cherry blossom,
cow face, crab, dolphin, dragon face, duck, eagle, elephant, fish, four leaf clover, fox,
frog, hamster, hedgehog, hibiscus, honeybee, horse face, koala, lady beetle, lion, lobster,
maple leaf, monkey face, mouse face, mushroom, octopus, owl, palm tree, panda, parrot, penguin,
pig face, polar bear, rabbit face, rose, shark, snail, snake, sunflower, tiger face, tulip,
turtle, unicorn, whale, wolf, avocado, banana, beer mug, birthday cake, bread, broccoli,
burrito, carrot, cheese wedge, cherries, cookie, cupcake, doughnut, eggplant, french fries, grapes,
green apple, hamburger, hot dog, hot pepper, ice cream, kiwi fruit, lemon, lollipop, mango, peach,
pear, pineapple, popcorn, pretzel, sandwich, strawberry, taco, tangerine, tomato, watermelon,
axe, backpack, bell, bomb, books, bucket, camera, candle, coin, crown,
door, drum, floppy disk, gem stone, graduation cap, guitar, hammer, light bulb, locked, magnet,
microphone, money bag, package, paintbrush, pencil, shield, socks, sunglasses, t-shirt, telephone,
toolbox, top hat, violin, airplane, alarm clock, ambulance, anchor, bus, car, castle,
cloud, compass, fire, flying saucer, full moon, hourglass done, house, lighthouse, locomotive,
police car, rainbow, ringed planet, sailboat, snowflake, snowman, sun, taxi, tent, tractor, umbrella
"""


def names() -> list[str]:
    return [name.strip() for name in NAMES.replace("\n", " ").split(",") if name.strip()]


def icons() -> dict[str, str]:
    """Icon bodies (SVG fragments) by name, as the package stores them."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            member = archive.extractfile("package/icons.json")
            assert member is not None
            data = json.load(member)
    return {name: icon["body"] for name, icon in data["icons"].items()}


def rasterize(body: str) -> Image.Image:
    """One glyph, 208 pixels wide, in the middle of a transparent 256 x 256 cell."""
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' viewBox="0 0 128 128">{body}</svg>'
    )
    glyph = Image.open(
        io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=svg, width=GLYPH, height=GLYPH)))
    ).convert("RGBA")
    cell = Image.new("RGBA", (CELL, CELL))
    cell.paste(glyph, ((CELL - GLYPH) // 2,) * 2)
    return cell


def main() -> None:
    out = Path(__file__).parents[2] / "mame_sd" / "embedded" / "unet"
    bodies, subjects = icons(), names()
    missing = [n for n in subjects if ALIASES.get(n, n.replace(" ", "-")) not in bodies]
    if missing or len(set(subjects)) != len(subjects):
        raise SystemExit(f"error: glyphs missing from {PACKAGE} or named twice: {missing}")
    cells = [np.asarray(rasterize(bodies[ALIASES.get(n, n.replace(" ", "-"))])) for n in subjects]
    rows = -(-len(cells) // COLUMNS)
    cells += [np.zeros_like(cells[0])] * (rows * COLUMNS - len(cells))
    sheet = (
        np.stack(cells)
        .reshape(rows, COLUMNS, CELL, CELL, 4)
        .transpose(0, 2, 1, 3, 4)
        .reshape(rows * CELL, -1, 4)
    )
    out.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet).save(out / "glyphs.webp", lossless=True, quality=100, method=6)
    index = {
        "names": subjects,
        "columns": COLUMNS,
        "cell": CELL,
        "source": PACKAGE,
        "license": "Apache-2.0",
    }
    (out / "glyphs.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    print(f"{len(subjects)} glyphs -> {out / 'glyphs.webp'}")


if __name__ == "__main__":
    main()
