"""Make up the daily sales of shops: data/sales.csv. Replace it by your own series."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

SHOPS, DAYS = ("center", "harbor", "hills", "market", "north", "station"), 900

random = np.random.default_rng(0)
holidays = random.random(DAYS) < 0.04
days = np.arange(DAYS)
Path("data").mkdir(exist_ok=True)
with Path("data/sales.csv").open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["shop", "day", "holiday", "sales"])
    for shop in SHOPS:
        level, trend, week = random.uniform(40, 200), random.uniform(-0.2, 0.5), random.uniform(0.6, 1.4, 7)
        expected = level * (1 + trend * days / DAYS) * week[days % 7] * np.where(holidays, 0.5, 1.0)
        sales = expected * random.lognormal(-0.005, 0.1, DAYS)
        writer.writerows(zip([shop] * DAYS, days, holidays.astype(int), sales.round(1), strict=True))
