"""The benchmark's table says who is faster, whichever way the unit points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.bench.report import Cell, Results, table, write_json

SPEED = Cell("decode", "tok/s", higher_is_better=True)
DELAY = Cell("TTFT", "ms", higher_is_better=False)


@pytest.mark.parametrize(
    ("cell", "ours", "theirs", "ratio"),
    [
        pytest.param(SPEED, [100, 300, 200], [100], 2.0, id="the median counts, twice the tokens are 2x"),
        pytest.param(DELAY, [50], [200], 4.0, id="a quarter of the delay is 4x"),
        pytest.param(DELAY, [200], [50], 0.25, id="below one is worse"),
        pytest.param(SPEED, [], [50], None, id="nothing measured, nothing claimed"),
    ],
)
def test_ratio_above_one_means_better(cell: Cell, ours: list[float], theirs: list[float], ratio: float | None) -> None:
    results = Results()
    for server, values in (("ours", ours), ("theirs", theirs)):
        for value in values:
            results.add(cell, server, value)
    assert results.ratio(cell, "ours", "theirs") == ratio


def test_table_has_a_row_per_cell_and_a_ratio_per_other_server() -> None:
    results = Results()
    for value in (10.0, 20.0, 40.0):
        results.add(SPEED, "ours", value)
    results.add(SPEED, "theirs", 10.0)
    header, _, row = table(results, ["ours", "theirs"], "theirs").splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["", "unit", "ours", "theirs", "ours vs theirs"]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "decode", "tok/s", "10.0 / 20.0 / 40.0", "10.0", "2.00x",
    ]  # fmt: skip


def test_file_keeps_raw_samples_beside_ratios(tmp_path: Path) -> None:
    results = Results()
    results.add(DELAY, "ours", 50.0)
    results.add(DELAY, "theirs", 100.0)
    write_json(tmp_path / "new" / "run.json", results, {"threads": 1}, "theirs")
    written = json.loads((tmp_path / "new" / "run.json").read_text())
    assert written["cells"][0]["samples"] == {"ours": [50.0], "theirs": [100.0]}
    assert written["cells"][0]["ratios"] == {"ours": 2.0}
    assert written["machine"]["cores"] >= 1
    assert written["settings"] == {"threads": 1}
