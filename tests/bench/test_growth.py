"""How costs are said to grow with the number of deployments."""

from __future__ import annotations

import pytest
from tests.bench.growth import growth_table, power


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({10: 3.0, 100: 3.0, 1000: 3.0}, 0.0),
        ({10: 2.0, 100: 20.0, 1000: 200.0}, 1.0),
        ({10: 1.0, 100: 100.0}, 2.0),
        ({100: 2.0, 10: 20.0}, -1.0),
    ],
    ids=["not at all", "in proportion", "with the square", "less with more"],
)
def test_the_power_by_which_a_cost_grows(values: dict[int, float], expected: float) -> None:
    assert power(values) == pytest.approx(expected)


@pytest.mark.parametrize("values", [{10: 1.0}, {10: 0.0, 100: 1.0}], ids=["one number", "nothing at first"])
def test_no_power_is_made_up(values: dict[int, float]) -> None:
    assert power(values) is None


def test_the_table_has_a_column_for_each_number() -> None:
    table = growth_table({100: {"passes": 50.0, "writes": 0.0}, 10: {"passes": 5.0, "writes": 0.0}}, "deployments")
    header, _, passes, writes = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert header == ["by number of deployments", "10", "100", "grows as"]
    assert passes == ["passes", "5", "50", "n^1.00"]
    assert writes == ["writes", "0", "0", "-"]
