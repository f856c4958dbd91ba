"""Pictures to caption: two to four glyphs, each on a card of another colour, on a patterned ground.

A caption names the glyphs and the colours of their cards row by row, then the ground. An example is
``a rocket on blue, a pizza on white and an owl on green, over red brick``. A picture follows from
(seed, kind, index) alone.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from mame_sd.embedded import model as subjects
from mame_sd.embedded.scenes import SUBJECTS
from scripts.training import world
from scripts.training.pictures import rng_of

CARD = (0.38, 0.47)  # side of a card in shares of the picture's
GLYPH = (0.78, 0.92)  # side of its glyph in shares of the card's
TURN = 7.0  # degrees, standard deviation of a glyph's angle


@dataclass(frozen=True)
class Card:
    """A glyph on a card: the card's corner and side, the glyph's side, in pixels."""

    name: str
    color: str
    x: int
    y: int
    side: int
    glyph: int
    angle: float

    @property
    def phrase(self) -> str:
        article = "an" if self.name[0] in "aeiou" else "a"
        return f"{article} {self.name} on {self.color}"


@dataclass(frozen=True)
class Cards:
    """What a picture shows."""

    cards: tuple[Card, ...]
    ground: world.Ground

    @property
    def caption(self) -> str:
        *first, last = (card.phrase for card in self.cards)
        return f"{', '.join(first)} and {last}, over {self.ground.phrase}"

    @property
    def references(self) -> list[str]:
        """The caption, and two others that say the same."""
        *first, last = (f"{card.name} on a {card.color} card" for card in self.cards)
        cards = f"{', '.join(first)} and {last}"
        turned = " and ".join(card.phrase for card in reversed(self.cards))
        return [
            self.caption,
            f"{cards}, on a {self.ground.phrase} background",
            f"{turned}, over {self.ground.phrase}",
        ]

    def owners(self) -> np.ndarray:
        """[side, side] the number of the card at each pixel, -1 where the ground shows."""
        owners = np.full((world.SIDE, world.SIDE), -1)
        for number, card in enumerate(self.cards):
            owners[card.y : card.y + card.side, card.x : card.x + card.side] = number
        return owners


def draw(seed: int, kind: str, index: int) -> Cards:
    """The scene of this number: its cards stand in different quarters of the picture."""
    rng = rng_of(seed, kind, index)
    ground = world.draw_ground(rng)
    count = int(rng.integers(2, 5))
    quarters = sorted(rng.choice(4, count, replace=False).tolist())
    names = rng.choice(SUBJECTS, count, replace=False).tolist()
    free = [color for color in subjects.BACKGROUNDS if color != ground.color]
    colors = rng.choice(free, count, replace=False).tolist()
    cards, half = [], world.SIDE // 2
    for quarter, name, color in zip(quarters, names, colors, strict=True):
        side = int(rng.uniform(*CARD) * world.SIDE)
        x, y = (int(rng.uniform(2, half - 2 - side)) for _ in range(2))
        x, y = x + half * (quarter % 2), y + half * (quarter // 2)
        angle = float(np.clip(rng.normal(0, TURN), -15, 15))
        cards.append(Card(name, color, x, y, side, int(side * rng.uniform(*GLYPH)), angle))
    return Cards(tuple(cards), ground)


def render(scene: Cards) -> np.ndarray:
    """The picture, uint8 [side, side, 3]."""
    canvas = world.paint_ground(scene.ground, 0)
    for card in scene.cards:
        canvas[card.y : card.y + card.side, card.x : card.x + card.side] = subjects.BACKGROUNDS[
            card.color
        ]
        glyph = world.glyph_image(subjects.glyph_names().index(card.name))
        cell = glyph.resize((card.glyph, card.glyph), Image.Resampling.LANCZOS)
        rgba = np.asarray(cell.rotate(card.angle, Image.Resampling.BICUBIC), np.float32)
        alpha, margin = rgba[..., 3:] / 255, (card.side - card.glyph) // 2
        top, left = card.y + margin, card.x + margin
        place = canvas[top : top + card.glyph, left : left + card.glyph]
        place[:] = rgba[..., :3] * alpha + place * (1 - alpha)
    return np.rint(canvas.clip(0, 255)).astype(np.uint8)
