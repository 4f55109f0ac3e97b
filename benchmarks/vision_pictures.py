"""Pictures of shapes and digits in colours, and what can be said of them.

Each has one or two of a square, a circle and a triangle, and a digit, all of different colours and
each in a quarter of its own, on grey. Places, sizes and shades vary: another seed gives pictures
that no other seed gives.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = ("square", "circle", "triangle")
DIGITS = tuple("0123456789")
KINDS = (*SHAPES, *DIGITS)
COLOURS = {
    "red": (220, 30, 35),
    "orange": (245, 145, 30),
    "yellow": (245, 235, 60),
    "green": (30, 150, 60),
    "blue": (35, 70, 220),
    "purple": (140, 45, 170),
    "white": (250, 250, 250),
    "black": (12, 12, 12),
}
NAMES = tuple(COLOURS)
NOTHING = ("The", "background", "is", "grey", ".")


class Thing(NamedTuple):
    """Something in a picture; lengths are parts of the picture's side."""

    kind: str  # of KINDS
    colour: str  # of NAMES
    rgb: tuple[int, int, int]
    x: float  # of its middle
    y: float
    size: float


class Scene(NamedTuple):
    background: tuple[int, int, int]
    things: tuple[Thing, ...]


class Question(NamedTuple):
    text: str
    answer: str  # a word that the right answer has


def scenes(seed: int) -> Iterator[Scene]:
    """Without an end."""
    rng = random.Random(seed)
    while True:
        yield _scene(rng)


def _scene(rng: random.Random) -> Scene:
    kinds = [*rng.sample(SHAPES, rng.choice((1, 2))), rng.choice(DIGITS)]
    colours = rng.sample(NAMES, len(kinds))
    quarters = rng.sample([(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)], len(kinds))
    grey = rng.randint(110, 185)
    things = []
    for kind, colour, (x, y) in zip(kinds, colours, quarters, strict=True):
        size = rng.uniform(0.3, 0.42)
        slack = (0.48 - size) / 2
        things.append(
            Thing(
                kind, colour, _shade(rng, COLOURS[colour], 18),
                x + rng.uniform(-slack, slack), y + rng.uniform(-slack, slack), size,
            )
        )  # fmt: skip
    return Scene(_shade(rng, (grey, grey, grey), 6), tuple(things))


def _shade(rng: random.Random, rgb: tuple[int, int, int], most: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, value + rng.randint(-most, most))) for value in rgb)
    return red, green, blue


def render(scene: Scene, side: int = 192) -> Image.Image:
    picture = Image.new("RGB", (side, side), scene.background)
    draw = ImageDraw.Draw(picture)
    for thing in scene.things:
        x, y, half = thing.x * side, thing.y * side, thing.size * side / 2
        if thing.kind == "square":
            draw.rectangle((x - half, y - half, x + half, y + half), fill=thing.rgb)
        elif thing.kind == "circle":
            draw.ellipse((x - half, y - half, x + half, y + half), fill=thing.rgb)
        elif thing.kind == "triangle":
            draw.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], thing.rgb)
        else:
            font = ImageFont.load_default(math.ceil(2.6 * half))
            draw.text((x, y), thing.kind, thing.rgb, font, anchor="mm", stroke_width=side // 64)
    return picture


def sentences(scene: Scene) -> list[tuple[str, ...]]:
    """What each quarter shows, in lines of the picture, as five words or signs."""
    said: list[tuple[str, ...]] = [NOTHING] * 4
    for thing in scene.things:
        is_digit = thing.kind in DIGITS
        noun, quality = ("digit", thing.kind) if is_digit else (thing.kind, thing.colour)
        said[2 * (thing.y > 0.5) + (thing.x > 0.5)] = ("The", noun, "is", quality, ".")
    return said


def questions(scene: Scene) -> list[Question]:
    """What the picture answers: the colour of each shape, the shape of each colour, the digit."""
    found = []
    for thing in scene.things:
        if thing.kind in DIGITS:
            found.append(Question("Which digit is in the picture?", thing.kind))
        else:
            found.append(Question(f"What colour is the {thing.kind}?", thing.colour))
            found.append(Question(f"Which shape is {thing.colour}?", thing.kind))
    return found
