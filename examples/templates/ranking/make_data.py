"""Make up hotels that a query found: data/train.csv, validation.csv and test.csv. Replace these by your own tables."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

ITEMS = 20  # of a query


def made_up_items(split: str, query: int) -> list[dict[str, Any]]:
    """Make up items: price and distance matter only up to a point, and nothing does without a match of the text."""
    random, items = np.random.default_rng([*split.encode(), query]), []
    for _ in range(ITEMS):
        match, price = random.uniform(), random.lognormal(4.3, 0.4)
        rating, distance = random.uniform(2, 5), random.exponential(3)
        value = match * ((rating - 2) + 2 * (price < 80) + 3 * np.exp(-distance)) + random.normal(0, 0.2)
        items.append(
            {
                "text_match": match,
                "price": price,
                "rating": rating,
                "distance": distance,
                "relevance": int(np.clip(value, 0, 4)),
                "query": query,
            }
        )
    return items


Path("data").mkdir(exist_ok=True)
for name, queries in {"train": 200, "validation": 50, "test": 150}.items():
    hotels = [hotel for query in range(queries) for hotel in made_up_items(name, query)]
    with Path(f"data/{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=hotels[0])
        writer.writeheader()
        writer.writerows(hotels)
