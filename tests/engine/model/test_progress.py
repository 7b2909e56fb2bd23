"""How far loading is, as it is told."""

from __future__ import annotations

from headrace_engine.models.progress import LoadProgress


class Told:
    """A progress of 100 bytes that reports every second of a clock that only the test moves."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int]] = []
        self.now = 0.0
        self.progress = LoadProgress(
            lambda done, total: self.reports.append((done, total)), interval_seconds=1.0, clock=lambda: self.now
        )
        self.progress.start(100)


def test_it_begins_and_ends_with_a_report() -> None:
    told = Told()
    told.progress.add(60)
    told.progress.add(40)
    assert told.reports == [(0, 100), (100, 100)]


def test_in_between_it_reports_once_an_interval() -> None:
    told = Told()
    for now in (0.5, 0.9, 1.0, 1.5, 1.9, 2.1):
        told.now = now
        told.progress.add(10)
    assert told.reports == [(0, 100), (30, 100), (60, 100)]


def test_a_rank_with_nothing_to_read_says_so() -> None:
    reports: list[tuple[int, int]] = []
    LoadProgress(lambda done, total: reports.append((done, total))).start(0)
    assert reports == [(0, 0)]
