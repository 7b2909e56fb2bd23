"""The resource: every rule accepts and rejects the same in Python and in CEL."""

from __future__ import annotations

from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel
from pydantic import ValidationError
from tests.operator.rule_cases import CASES, FIELD_CASES, Case, resource

from headrace_operator.api import DisaggDeployment
from headrace_operator.crd import custom_resource_definition
from headrace_operator.problems import describe_problems
from headrace_operator.rules import VALIDATIONS_KEY, broken_transitions

SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
ENVIRONMENT = celpy.Environment()


def python_refusal(case: Case) -> str:
    """What Python says against a case; empty if nothing."""
    try:
        deployment = DisaggDeployment.from_manifest(case.body)
    except ValidationError as error:
        return describe_problems(error)
    if case.before is not None:
        before = DisaggDeployment.from_manifest(resource(case.before))
        return "; ".join(broken_transitions(before.spec, deployment.spec))
    return ""


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """What the API server does before it checks rules: fill the schema's defaults in."""
    if isinstance(value, dict) and "properties" in schema:
        filled = dict(value)
        for name, child in schema["properties"].items():
            if name not in filled and "default" in child:
                filled[name] = child["default"]
            if name in filled:
                filled[name] = with_defaults(child, filled[name])
        return filled
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], item) for item in value]
    return value


def cel_refusals(schema: dict[str, Any], value: Any, before: Any = None) -> list[str]:
    """Messages of the rules in `schema` that `value` breaks, evaluated as the API server does."""
    refusals = []
    for rule in schema.get(VALIDATIONS_KEY, []):
        needs_before = "oldSelf" in rule["rule"]
        if needs_before and before is None:
            continue
        program = ENVIRONMENT.program(ENVIRONMENT.compile(rule["rule"]))
        context = {"self": json_to_cel(value)} | ({"oldSelf": json_to_cel(before)} if needs_before else {})
        if not program.evaluate(context):
            refusals.append(rule["message"])
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name in value:
                old = before.get(name) if isinstance(before, dict) else None
                refusals += cel_refusals(child, value[name], old)
    if isinstance(value, list):
        for item in value:
            refusals += cel_refusals(schema["items"], item)
    return refusals


@pytest.mark.parametrize("case", CASES + FIELD_CASES, ids=lambda case: case.name)
def test_python_accepts_or_refuses(case: Case) -> None:
    refusal = python_refusal(case)
    if case.message is None:
        assert refusal == ""
    elif case.changes.get("metadata.name"):
        assert "metadata.name" in refusal  # Python checks names by the field's own bounds
    else:
        assert case.message in refusal


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cel_accepts_or_refuses(case: Case) -> None:
    before = with_defaults(SCHEMA, resource(case.before)) if case.before is not None else None
    refusals = cel_refusals(SCHEMA, with_defaults(SCHEMA, case.body), before)
    if case.message is None:
        assert refusals == []
    else:
        assert any(case.message in refusal for refusal in refusals)


def test_every_rule_is_broken_by_some_case() -> None:
    def messages(schema: dict[str, Any]) -> set[str]:
        found = {rule["message"] for rule in schema.get(VALIDATIONS_KEY, [])}
        for child in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
            found |= messages(child)
        return found

    broken = [case.message for case in CASES if case.message]
    assert [m for m in messages(SCHEMA) if not any(part in m for part in broken)] == []


def test_unknown_fields_are_refused_in_files_and_ignored_in_storage() -> None:
    body = resource({"spec.engine": {"fromTheFuture": True}})
    with pytest.raises(ValidationError, match="fromTheFuture"):
        DisaggDeployment.from_manifest(body)
    assert DisaggDeployment.from_stored(body).spec.engine.block_size == 128


@pytest.mark.parametrize("containers", [None, {}, ["engine"]])
def test_a_template_cannot_take_the_containers_away(containers: Any) -> None:
    with pytest.raises(ValidationError, match="containers must be a list of objects"):
        DisaggDeployment.from_manifest(resource({"spec.roles.0.template": {"podSpec": {"containers": containers}}}))


def test_a_spec_that_is_wrong_all_over_is_told_in_few_words() -> None:
    roles = [{"name": "decode", "replicas": -1, f"unknown{i}": 1} for i in range(40)]
    with pytest.raises(ValidationError) as raised:
        DisaggDeployment.from_manifest(resource({"spec.roles": roles, "spec.engine": {str(i): 1 for i in range(40)}}))
    told = describe_problems(raised.value)
    assert len(told) < 2000
    assert told.endswith(" more")


def test_problems_are_told_with_their_place() -> None:
    with pytest.raises(ValidationError) as raised:
        DisaggDeployment.from_manifest(resource({"spec.roles.1.parallelism": {"data": 3, "dataLocal": 2}}))
    assert describe_problems(raised.value) == (
        "spec.roles.1.parallelism: dataLocal must divide data, and be set where data is over 64"
    )
