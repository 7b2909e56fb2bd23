"""Waiting for the watches to show the last writes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_operator.expectations import MAX_WAIT_SECONDS, Expectations


def body(version: int, uid: str = "u", **metadata: Any) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"name": "p", "uid": uid, "resourceVersion": str(version), **metadata}}


@pytest.mark.parametrize(
    ("shown", "is_met"),
    [(None, False), (body(4), False), (body(5), True), (body(6), True)],
)
def test_a_write_is_met_by_its_version_or_a_newer_one(shown: dict[str, Any] | None, is_met: bool) -> None:
    expected = Expectations()
    expected.wrote(body(5), now=0.0)
    assert expected.are_met({("Pod", "p"): shown} if shown else {}, now=1.0) is is_met


@pytest.mark.parametrize(
    ("shown", "is_met"),
    [(body(5), False), (None, True), (body(9, uid="next"), True), (body(6, deletionTimestamp="now"), True)],
)
def test_a_deletion_is_met_when_the_object_goes_or_is_gone(shown: dict[str, Any] | None, is_met: bool) -> None:
    expected = Expectations()
    expected.removed("Pod", "p", "u", now=0.0)
    assert expected.are_met({("Pod", "p"): shown} if shown else {}, now=1.0) is is_met


def test_waiting_ends() -> None:
    expected = Expectations()
    expected.wrote(body(5), now=0.0)
    assert expected.are_met({}, now=MAX_WAIT_SECONDS)


def test_it_goes_on_while_writes_are_shown_one_by_one() -> None:
    expected = Expectations()
    for name in ("p", "q"):
        expected.wrote({"kind": "Pod", "metadata": {"name": name, "resourceVersion": "5"}}, now=0.0)
    assert not expected.are_met({("Pod", "p"): body(5)}, now=MAX_WAIT_SECONDS - 1)
    assert not expected.are_met({}, now=MAX_WAIT_SECONDS + 1)  # what was shown need not stay
    assert expected.are_met({}, now=2 * MAX_WAIT_SECONDS - 1)


def test_nothing_written_is_nothing_to_wait_for() -> None:
    assert Expectations().are_met({}, now=0.0)
