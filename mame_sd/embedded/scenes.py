"""List the prompts of the embedded transformer: a subject on a ground with a pattern.

A prompt names subject, colour and texture: "rocket on a red brick background". It doesn't name
place, size and angle of the subject, nor the pattern's period and phase, so that several pictures
fit each prompt.
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
SMALLEST, LARGEST = 0.5, 0.9  # side of the subject's cell, relative to the picture's


def ground_phrases() -> list[str]:
    """List the grounds that a prompt may name: a colour, or a colour and a texture."""
    return [f"{color} {texture}".strip() for texture in TEXTURES for color in model.BACKGROUNDS]


@cache
def scenes_by_caption() -> dict[str, tuple[str, str]]:
    """Return the subject and the ground of every prompt of the transformer, by prompt."""
    pairs = ((name, ground) for name in SUBJECTS for ground in ground_phrases())
    return {model.caption(*pair): pair for pair in pairs}
