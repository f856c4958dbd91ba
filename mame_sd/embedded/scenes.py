"""What the embedded transformer was trained to draw: a subject at a free place, size and angle, on
a ground with a free pattern.

The prompt names subject, colour and texture (``rocket on a red brick background``). Place, size,
angle and the pattern's period and phase stand nowhere, so that no single picture is the truth.
"""

from functools import cache

from . import model

_NAMES = """
rocket, red apple, cat face, star, red heart, pizza, tree, balloon, basketball, soccer
ball, teddy bear, butterfly, cactus, crab, elephant, fish, fox, frog, honeybee, lion,
owl, panda, penguin, pig face, sunflower, whale, banana, birthday cake, carrot,
hamburger, ice cream, pineapple, strawberry, watermelon, car, sailboat, umbrella, full
moon, t-shirt, house
"""
SUBJECTS = tuple(name.strip() for name in _NAMES.replace("\n", " ").split(", "))
TEXTURES = ("", "striped", "checked", "brick")
SMALLEST, LARGEST = 0.5, 0.9  # side of the subject's cell, in shares of the picture's


def ground_phrases() -> list[str]:
    """Every ground that a prompt may name: a colour, or a colour and a texture."""
    return [f"{color} {texture}".strip() for texture in TEXTURES for color in model.BACKGROUNDS]


@cache
def scenes_by_caption() -> dict[str, tuple[str, str]]:
    """(subject, ground) of every prompt that the transformer was made for."""
    pairs = ((name, ground) for name in SUBJECTS for ground in ground_phrases())
    return {model.caption(*pair): pair for pair in pairs}
