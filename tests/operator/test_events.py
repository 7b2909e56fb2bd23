"""Events: how they look, and what is not said twice."""

from __future__ import annotations

from tests.operator.rule_cases import resource
from tests.operator.worlds import UID

from headrace_operator.events import (
    MAX_NOTES_OF_A_REASON,
    REPEAT_SECONDS,
    RecentNotes,
    event_body,
    summarized,
)
from headrace_operator.plans import Note

FAILED = Note("GroupFailed", "decode group 0", is_warning=True)


def test_an_event_names_the_deployment_and_never_repeats_a_name() -> None:
    raw = resource()
    raw["metadata"] |= {"namespace": "default", "uid": UID}
    first = event_body(raw, Note("GroupFailed", "x" * 3000, is_warning=True), now=1.0)
    assert first["involvedObject"]["uid"] == UID
    assert (first["type"], len(first["message"])) == ("Warning", 1024)
    assert first["metadata"]["name"] != event_body(raw, Note("GroupFailed", "x" * 3000), now=2.0)["metadata"]["name"]


def test_the_same_news_is_told_again_only_after_a_while() -> None:
    recent = RecentNotes()
    assert recent.news([FAILED], 0.0) == [FAILED]
    assert recent.news([FAILED, Note("GroupFailed", "decode group 1")], 1.0) == [Note("GroupFailed", "decode group 1")]
    assert recent.news([FAILED], REPEAT_SECONDS) == [FAILED]


def test_what_is_remembered_is_bounded() -> None:
    recent = RecentNotes()
    for i in range(10_000):
        recent.news([Note("GroupCreated", str(i))], 0.0)
    assert recent.news([Note("GroupCreated", "0"), Note("GroupCreated", "9999")], 1.0) == [Note("GroupCreated", "0")]


def test_hundreds_of_groups_are_one_piece_of_news() -> None:
    notes = [Note("GroupCreated", f"decode group {i}") for i in range(64)] + [FAILED]
    told = summarized(notes)
    assert len(told) == MAX_NOTES_OF_A_REASON + 1
    assert told[MAX_NOTES_OF_A_REASON - 1].message == f"decode group 9 (and {64 - MAX_NOTES_OF_A_REASON} more)"
    assert told[-1] == FAILED
