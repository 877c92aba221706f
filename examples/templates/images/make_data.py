"""Draw shapes: data/train/circle/0.png and so on. Replace these by your own pictures in one folder for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from codec import CLASSES, SIZE
from PIL import Image, ImageDraw


def drawing(name: str, random: np.random.Generator) -> Image.Image:
    """Draw a bright shape of any size, place and color on a dark, noisy background."""
    noise = random.normal(random.uniform(20, 90, 3), 20, (SIZE, SIZE, 3))
    picture = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
    radius = random.uniform(7, 13)
    x, y = random.uniform(radius + 1, SIZE - radius - 1, 2)
    color, draw = tuple(random.integers(130, 256, 3).tolist()), ImageDraw.Draw(picture)
    if name == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    else:
        draw.regular_polygon((x, y, radius), 4 if name == "square" else 3, random.uniform(0, 360), fill=color)
    return picture


for split, count in {"train": 1500, "validation": 300, "test": 600}.items():
    generator = np.random.default_rng(list(split.encode()))
    for index in range(count):
        kind = CLASSES[int(generator.integers(len(CLASSES)))]
        folder = Path("data", split, kind)
        folder.mkdir(parents=True, exist_ok=True)
        drawing(kind, generator).save(folder / f"{index}.png")
