"""Revisions: what changes one, and what must not."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.rule_cases import resource
from tests.operator.worlds import stored

from headrace_operator.api import DisaggDeployment
from headrace_operator.revision import RoleTemplate


def revision(changes: dict[str, Any], role: str = "decode") -> str:
    return RoleTemplate.of(DisaggDeployment.from_manifest(resource(changes)).spec, role).revision


BASE = revision({})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("replicas", {"spec.roles.1.replicas": 5}),
        ("a default written out", {"spec.engine": {"blockSize": 128, "dtype": "auto"}}),
        ("an empty block", {"spec.roles.1.parallelism": {}}),
        ("the other role", {"spec.roles.0.parallelism": {"data": 2}}),
        ("the router", {"spec.router": {"replicas": 3, "image": "other:1"}}),
        ("the deployment's name", {"metadata.name": "another"}),
    ],
)
def test_a_revision_does_not_depend_on(name: str, changes: dict[str, Any]) -> None:
    assert revision(changes) == BASE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("engine image", {"spec.engine": {"image": "engine:2"}}),
        ("engine settings", {"spec.engine": {"maxSequences": 8}}),
        ("model source", {"spec.model.source.tiny.seed": 1}),
        ("lease", {"spec.transfer": {"leaseSeconds": 10}}),
        ("drain time", {"spec.drainTimeoutSeconds": 10}),
        ("its parallelism", {"spec.roles.1.parallelism": {"data": 2}}),
        ("its resources", {"spec.roles.1.resources": {"requests": {"cpu": 1}}}),
        ("its template", {"spec.roles.1.template": {"labels": {"a": "b"}}}),
    ],
)
def test_a_revision_depends_on(name: str, changes: dict[str, Any]) -> None:
    assert revision(changes) != BASE


def test_the_order_of_keys_does_not_matter() -> None:
    labels = {"spec.roles.1.template": {"labels": {"a": "1", "b": "2"}}}
    other = {"spec.roles.1.template": {"labels": {"b": "2", "a": "1"}}}
    assert revision(labels) == revision(other)


def test_the_order_of_named_things_does_not_matter() -> None:
    """Two appliers of a list that is merged by name may leave it in either order."""
    volumes = [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]
    mounts = [{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/b"}]
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    one = {"volumes": volumes, "volumeMounts": mounts, "env": env}
    other = {key: items[::-1] for key, items in one.items()}
    assert revision({"spec.roles.1.template": one}) == revision({"spec.roles.1.template": other})


def test_the_order_of_variables_matters_where_one_refers_to_another() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}]
    one, other = {"env": env}, {"env": env[::-1]}
    assert revision({"spec.roles.1.template": one}) != revision({"spec.roles.1.template": other})


def test_known_revisions_stay_as_they_are() -> None:
    # A change here rolls every deployment out again when the operator is upgraded.
    assert BASE == "ffdb31ad"


def test_the_stored_template_keeps_the_image_and_reads_back_the_same() -> None:
    template = RoleTemplate.of(DisaggDeployment.from_manifest(resource()).spec, "decode").with_image("engine:1")
    assert template.engine.image == "engine:1"
    assert template.with_image("engine:2") == template
    assert RoleTemplate.model_validate(template.as_written()) == template


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"spec.roles.1.parallelism": {"data": 2}}, True),
        ({"spec.engine": {"maxSequences": 8}}, True),
        ({"spec.roles.0.replicas": 3}, True),
        ({"spec.engine": {"cacheDtype": "bfloat16"}}, False),
        ({"spec.engine": {"dtype": "bfloat16"}}, False),
        ({"spec.engine": {"fakeQuantization": "none"}}, True),
        ({"spec.engine": {"fakeQuantization": "cache"}}, False),
        ({"spec.engine": {"blockSize": 256}}, False),
        ({"spec.engine": {"image": "engine:2"}}, False),  # it may lay out its cache in another way
        ({"spec.model.source": {"tiny": {"family": "v4", "seed": 7}}}, False),
    ],
)
def test_what_changes_the_kv_fingerprint(changes: dict[str, Any], is_same: bool) -> None:
    before, after = stored(), stored(changes)
    for role in ("prefill", "decode"):
        old, new = (RoleTemplate.of(deployment.spec, role).kv_fingerprint for deployment in (before, after))
        assert (old == new) == is_same


def test_both_roles_of_a_spec_have_one_kv_fingerprint_whatever_image_was_the_default() -> None:
    spec = stored({"spec.roles.1.parallelism": {"data": 2}}).spec
    prefill = RoleTemplate.of(spec, "prefill").with_image("engine:1")
    decode = RoleTemplate.of(spec, "decode").with_image("engine:2")
    assert prefill.kv_fingerprint == decode.kv_fingerprint
    assert RoleTemplate.model_validate(prefill.as_written()).kv_fingerprint == prefill.kv_fingerprint
