"""Earlier revisions: which are kept, how they are numbered, and going back with all roles together."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.rule_cases import resource
from tests.operator.worlds import FakeCluster, stored

from headrace_operator.api import DisaggDeployment
from headrace_operator.cli_history import history_table
from headrace_operator.history import HISTORY_LIMIT, CannotUndo, Entry, chosen, entries, restored

ROLES = ["prefill", "decode"]
A: dict[str, Any] = {}
B: dict[str, Any] = {"spec.engine": {"maxSequences": 8}}
C: dict[str, Any] = {**B, "spec.roles.1.template": {"labels": {"x": "1"}}}


def after(*specs: dict[str, Any]) -> tuple[FakeCluster, list[Entry]]:
    """A deployment that had these specs one after the other, from generation 1."""
    cluster = FakeCluster()
    for generation, changes in enumerate(specs, start=1):
        cluster.settle(stored(changes, generation))
    return cluster, entries(revisions(cluster), ROLES)


def revisions(cluster: FakeCluster) -> list[dict[str, Any]]:
    return [body for (kind, _), body in cluster.objects.items() if kind == "ControllerRevision"]


def spec_of(changes: dict[str, Any], entry: Entry) -> dict[str, Any]:
    return dict(restored(resource(changes), entry)["spec"])


def test_each_spec_is_a_step_with_the_revisions_of_both_roles() -> None:
    _, found = after(A, B, C)
    assert [entry.number for entry in found] == [1, 2, 3]
    assert found[1].revisions["prefill"] == found[2].revisions["prefill"]  # C changed decode only
    assert found[1].revisions["decode"] != found[2].revisions["decode"]


def test_history_says_what_each_step_changed() -> None:
    lines = history_table(after(A, B, C)[1]).splitlines()
    assert lines[0].startswith("   1  prefill ")
    assert lines[1].endswith(": engine.maxSequences")
    assert lines[2].endswith(": decode.template")


@pytest.mark.parametrize(("number", "changes"), [(None, B), (2, B), (1, A), (3, C)])
def test_undo_gives_back_the_very_spec_and_keeps_the_numbers_of_groups(
    number: int | None, changes: dict[str, Any]
) -> None:
    _, found = after(A, B, C)
    spec = spec_of({**C, "spec.roles.0.replicas": 3}, chosen(found, number))
    assert spec == resource({**changes, "spec.roles.0.replicas": 3})["spec"]
    DisaggDeployment.from_manifest({**resource(), "spec": spec})


def test_an_image_that_was_filled_in_is_not_written_into_the_spec() -> None:
    _, found = after(A, B)
    assert "engine" not in spec_of(B, chosen(found, 1))


def test_a_spec_that_comes_back_is_the_latest_and_makes_no_new_revision() -> None:
    cluster, found = after(A, B, A)
    assert [entry.number for entry in found] == [2, 3]
    assert len(revisions(cluster)) == 4
    assert cluster.decide(stored(A, 3)).apply == ()
    assert chosen(found, None).number == 2


def test_old_revisions_are_pruned_and_those_that_groups_have_are_not() -> None:
    pairs = {"spec.roles.1.parallelism": {"data": 2, "dataLocal": 1, "expert": True}}
    specs = [{"spec.engine": {"maxSequences": n}, **pairs} for n in range(1, HISTORY_LIMIT + 5)]
    cluster, found = after(*specs)
    assert len(found) == HISTORY_LIMIT
    assert found[-1].number == len(specs)
    assert len(revisions(cluster)) == 2 * HISTORY_LIMIT
    services = [name for kind, name in cluster.objects if kind == "Service"]
    assert len(services) == 3  # the router's, and for each role its leaders'


def test_there_may_be_nothing_to_go_back_to() -> None:
    _, found = after(A)
    with pytest.raises(CannotUndo, match="no earlier revision"):
        chosen(found, None)
    with pytest.raises(CannotUndo, match="there is no revision 7; there are 1"):
        chosen(found, 7)
