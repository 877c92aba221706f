"""What clients send → arrays for the model → what they get back. Only numpy; training uses it too."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline import InvalidPayload

HISTORY, HORIZONS = 56, 14  # days; replace: whole weeks before the forecast, and days to forecast


class Codec:
    """An instance is {"history": 56 numbers, "weekday": 0 to 6, that of the first day to forecast, "holidays": [3]}.

    `holidays` are the days of the forecast that are holidays, 1 to 14; it may be left out.
    """

    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        for instance in instances:
            if not isinstance(instance, dict) or not {"history", "weekday"} <= instance.keys():
                raise InvalidPayload("instances: each must be an object with history, weekday and perhaps holidays")
        return {
            "history": np.array([_history(each["history"]) for each in instances], np.float32),
            "days": np.array([_days(each["weekday"], each.get("holidays", [])) for each in instances], np.float32),
        }

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        names = ("low", "forecast", "high")  # of the quantiles
        return [dict(zip(names, rows.T.round(2).tolist(), strict=True)) for rows in outputs["sales"].astype(np.float64)]


def _history(values: Any) -> np.ndarray[Any, Any]:
    numbers = [value for value in values if isinstance(value, int | float)] if isinstance(values, list) else []
    if len(numbers) != HISTORY or numbers != values or not np.isfinite(numbers).all():
        raise InvalidPayload(f"history: must be the {HISTORY} finite numbers of the last days, oldest first")
    return np.array(numbers, np.float32)


def _days(weekday: Any, holidays: Any) -> np.ndarray[Any, Any]:
    """Return for each day of the forecast its weekday, as one column for each, and whether it is a holiday."""
    if weekday not in range(7):
        raise InvalidPayload(f"weekday: must be 0 to 6, that of the first day to forecast, found {weekday!r}")
    if not isinstance(holidays, list) or any(day not in range(1, HORIZONS + 1) for day in holidays):
        raise InvalidPayload(f"holidays: must be a list of days of the forecast, 1 to {HORIZONS}, found {holidays!r}")
    days = np.zeros((HORIZONS, 8))
    days[np.arange(HORIZONS), (weekday + np.arange(HORIZONS)) % 7] = 1
    days[[day - 1 for day in holidays], 7] = 1
    return days
