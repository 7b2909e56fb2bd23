"""What we created counts as applied from the first apply on."""

from __future__ import annotations

from typing import Any

from headrace_operator import names
from headrace_operator.field_owners import owned_by_apply


def entry(operation: str, fields: dict[str, Any], manager: str = names.MANAGER, **more: Any) -> dict[str, Any]:
    version = {"apiVersion": "v1", "fieldsType": "FieldsV1"}
    return {"manager": manager, "operation": operation, **version, "fieldsV1": fields, **more}


PORTS = {"f:spec": {"f:ports": {'k:{"port":8000}': {".": {}, "f:name": {}}}}}
SELECTOR = {"f:spec": {"f:selector": {}}}


def test_what_was_created_is_declared_applied_and_others_keep_what_they_own() -> None:
    others = [
        entry("Update", PORTS, manager="kubectl-edit"),
        entry("Apply", PORTS, manager="somebody"),
        entry("Update", {"f:status": {}}, subresource="status"),
    ]
    assert owned_by_apply([others[0], entry("Update", SELECTOR), *others[1:]]) == [entry("Apply", SELECTOR), *others]


def test_what_wowned_by_apply_since_is_one_set_with_what_was_created() -> None:
    both = {"f:spec": {**PORTS["f:spec"], **SELECTOR["f:spec"]}}
    assert owned_by_apply([entry("Apply", PORTS), entry("Update", SELECTOR)]) == [entry("Apply", both)]
    assert owned_by_apply([entry("Update", both), entry("Apply", PORTS)]) == [entry("Apply", both)]


def test_what_we_only_applied_or_never_wrote_stays_as_it_is() -> None:
    assert owned_by_apply([entry("Apply", PORTS), entry("Update", SELECTOR, manager="kubectl-edit")]) is None
    assert owned_by_apply([]) is None
