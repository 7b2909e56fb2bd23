"""How costs grow with the number of things: a table with one column for each number, and the power that fits. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

Costs = Mapping[str, float]


def power(values: Mapping[int, float]) -> float | None:
    """p of the power law `number ** p` that fits values by number best: the least-squares slope of their logarithms.

    1: twice as many cost twice as much; 0: it does not depend. None where a value is not positive or there is only one.
    """
    if len(values) < 2 or any(value <= 0 for value in values.values()):
        return None
    xs = [math.log(number) for number in values]
    ys = [math.log(value) for value in values.values()]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread


def growth_table(costs: Mapping[int, Costs], of: str) -> str:
    """A Markdown table: one row for each cost, one column for each number of `of`, and how it grows."""
    numbers = sorted(costs)
    rows = [[f"by number of {of}", *map(str, numbers), "grows as"]]
    for what in costs[numbers[0]]:
        values = {number: costs[number][what] for number in numbers}
        found = power(values)
        rows.append([what, *(f"{value:.4g}" for value in values.values()), "-" if found is None else f"n^{found:.2f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
