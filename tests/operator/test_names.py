"""Names: within Kubernetes' limits for the largest deployment that the rules allow."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.operator.rule_cases import resource

from headrace_operator import names
from headrace_operator.api import DisaggDeployment

LONGEST = "a" * names.MAX_NAME_LENGTH
REVISION = "0" * names.REVISION_LENGTH
LABEL_VALUE = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")


def test_the_longest_pod_name_fits_a_host_name() -> None:
    last = names.pod_name(LONGEST, names.UNIFIED, REVISION, names.MAX_GROUPS - 1, names.MAX_PODS_PER_GROUP - 1)
    assert len(last) == 63


def test_all_other_names_fit_a_service_name() -> None:
    for name in (
        names.revision_name(LONGEST, names.UNIFIED, REVISION),
        names.role_service_name(LONGEST, names.UNIFIED),
        names.router_name(LONGEST),
        names.router_service_name(LONGEST),
    ):
        assert len(name) <= 63
        assert LABEL_VALUE.match(name)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", *names.ROLES, names.LEADERS, names.ROUTER, REVISION]), min_size=1, max_size=4))
def test_no_deployment_is_named_like_another_ones_service(parts: list[str]) -> None:
    """Whatever two deployments are called, the names of their Services differ."""
    name = "-".join(parts)
    try:
        DisaggDeployment.from_manifest(resource({"metadata.name": name}))
    except ValidationError:
        return
    for other in ("-".join(parts[:length]) for length in range(1, len(parts))):
        engines = {names.role_service_name(other, role) for role in names.ROLES}
        assert names.router_service_name(name) not in engines


def test_the_leader_is_pod_zero_under_the_service_of_its_role() -> None:
    assert names.leader_host("demo", "decode", "abc", 3) == "demo-decode-abc-3-0.demo-decode-leaders"


@pytest.mark.parametrize("deployment", ["demo", "chat-decode", "a-prefill-0123abcd-1-2", LONGEST])
@pytest.mark.parametrize("role", names.ROLES)
def test_names_tell_what_they_were_made_of(deployment: str, role: str) -> None:
    assert names.place_of_pod(names.pod_name(deployment, role, REVISION, 12, 999)) == (role, REVISION, 12, 999)
    assert names.place_of_revision(names.revision_name(deployment, role, REVISION)) == (role, REVISION)
    assert names.role_of_scaler(names.scaler_name(deployment, role)) == role


def test_other_names_tell_nothing() -> None:
    for name in (
        "demo",
        "demo-router-5d4f-x",
        "demo-decode-0123abcd-1",
        "decode-0123abcd-1-0",
        "demo-encode-0123abcd-0-0",
    ):
        assert names.place_of_pod(name) is None
    assert names.place_of_revision("demo-decode") == ("", "")
    assert names.role_of_scaler("demo") == ""


def test_label_values_are_valid() -> None:
    for value in names.pod_labels(LONGEST, names.UNIFIED, REVISION, 999, 999).values():
        assert len(value) <= 63
        assert LABEL_VALUE.match(value)
