"""The transfer benchmark runs end to end and reports what it measured."""

from __future__ import annotations

import json

import pytest

from headrace_engine.bench.transfer import main


def test_it_reports_both_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--blocks", "16", "--block-bytes", "4096", "--slot-bytes", "64", "--repeats", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["transfer"]
    assert [row["layout"] for row in rows] == ["contiguous", "scattered"]
    for row in rows:
        assert row["num_bytes"] == 16 * 4096 + 64
        assert row["ratio"] == pytest.approx(row["push_gb_per_second"] / row["bare_gb_per_second"])


def test_nonsense_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--blocks", "0"])
    assert "--blocks must be positive" in capsys.readouterr().err
