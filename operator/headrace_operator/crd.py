"""From the pydantic models to the CustomResourceDefinitions: a converter that knows every key or refuses.

Kubernetes wants a *structural* schema: no references, no unions with null, no `additionalProperties` by `properties`.
What pydantic emits beyond the keys named here raises, so that a new kind of field cannot reach a cluster unnoticed.
Run as a module it writes them into the folders given, or with --check fails if they differ (`make crds`,
`make crds-check`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from headrace_operator import names
from headrace_operator.api import DisaggDeployment, Spec
from headrace_operator.api_scaling import DisaggRoleScaler, ScalerSpec, ScalerStatus
from headrace_operator.api_status import Status
from headrace_operator.rules import VALIDATIONS_KEY

_KEPT = {
    "type", "format", "description", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems",
    "maxItems", "maxProperties", "required", VALIDATIONS_KEY, "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string",
}  # fmt: skip
_HANDLED = {"$ref", "$defs", "anyOf", "properties", "items", "additionalProperties", "default", "const"}
_DROPPED = {"title"}

Column = tuple[str, str, int, str]  # name, JSON path, priority, description
_COLUMNS = (
    ("Ready", '.status.conditions[?(@.type=="Ready")].status', 0, "Every wanted group and the router is ready"),
    ("Prefill", ".status.summary.prefill", 0, "Groups that can prefill: ready/wanted"),
    ("Decode", ".status.summary.decode", 0, "Groups that can decode: ready/wanted"),
    ("Topology", ".status.summary.topology", 0, "Prefill groups + decode groups"),
    ("Age", ".metadata.creationTimestamp", 0, ""),
    ("Reason", ".status.summary.reason", 1, "Why it is not ready"),
)
_SCALER_COLUMNS = (
    ("Wished", ".spec.replicas", 0, "Groups that are asked for"),
    ("Groups", ".status.replicas", 0, "Groups that have pods"),
    ("Age", ".metadata.creationTimestamp", 0, ""),
)


class SchemaError(ValueError):
    """A model uses something that a structural schema cannot say."""


def structural_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite a pydantic JSON schema (by alias, validation mode) as a structural schema."""
    return _convert(schema, schema.get("$defs", {}), path="")


def _convert(node: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> dict[str, Any]:
    node = _resolve(node, definitions, path)
    unknown = set(node) - _KEPT - _HANDLED - _DROPPED
    if unknown:
        raise SchemaError(f"{path or 'root'}: {sorted(unknown)} cannot be said in a CustomResourceDefinition")
    result = {key: value for key, value in node.items() if key in _KEPT}
    if "const" in node:
        result["enum"] = [node["const"]]
    if "properties" in node:
        result["properties"] = {
            name: _convert(child, definitions, f"{path}.{name}") for name, child in node["properties"].items()
        }
    if "items" in node:
        result["items"] = _convert(node["items"], definitions, f"{path}[]")
    extra = node.get("additionalProperties")
    if isinstance(extra, Mapping):
        result["additionalProperties"] = _convert(extra, definitions, f"{path}{{}}")
    if "default" in node and node["default"] is not None:
        # An object's default repeats its fields' defaults: rules are checked against it before those are filled in.
        is_object = isinstance(node["default"], Mapping)
        result["default"] = _defaults_of(result.get("properties", {})) if is_object else node["default"]
    return result


def _defaults_of(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name: child["default"] for name, child in properties.items() if "default" in child}


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Inline references and the optional form `anyOf: [T, null]`; the outer keys win over the inlined ones."""
    resolved = dict(node)
    for _ in range(8):  # references do not nest deeper; a recursive model would not end
        if "$ref" in resolved:
            target = definitions[resolved.pop("$ref").rsplit("/", 1)[-1]]
        elif "anyOf" in resolved:
            arms = [arm for arm in resolved.pop("anyOf") if arm != {"type": "null"}]
            if len(arms) != 1:
                raise SchemaError(f"{path}: a union of types cannot be said in a structural schema")
            target = arms[0]
        else:
            return resolved
        resolved = {**target, **resolved}
    raise SchemaError(f"{path}: references go round in a circle")


def custom_resource_definition() -> dict[str, Any]:
    """The CRD of DisaggDeployment as plain data."""
    resource_names = {
        "kind": names.KIND,
        "listKind": f"{names.KIND}List",
        "plural": names.PLURAL,
        "singular": names.SINGULAR,
        "shortNames": [names.SHORT_NAME],
    }
    schema = _object_schema(DisaggDeployment, Spec, Status)
    schema[VALIDATIONS_KEY] = [{"rule": r.cel, "message": r.message} for r in DisaggDeployment.rules]
    return _definition(resource_names, schema, _COLUMNS)


def scaler_definition() -> dict[str, Any]:
    """The CRD of DisaggRoleScaler as plain data; its /scale is what autoscalers read and write."""
    resource_names = {
        "kind": names.SCALER_KIND,
        "listKind": f"{names.SCALER_KIND}List",
        "plural": names.SCALER_PLURAL,
        "singular": names.SCALER_SINGULAR,
        "shortNames": [names.SCALER_SHORT_NAME],
    }
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return _definition(
        resource_names, _object_schema(DisaggRoleScaler, ScalerSpec, ScalerStatus), _SCALER_COLUMNS, scale=scale
    )


def _definition(
    resource_names: dict[str, Any], schema: dict[str, Any], columns: Sequence[Column], **subresources: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource_names['plural']}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": resource_names,
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}, **subresources},
                    "additionalPrinterColumns": [_column(*column) for column in columns],
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _column(name: str, path: str, priority: int, description: str) -> dict[str, Any]:
    kind = {"Age": "date", "Wished": "integer", "Groups": "integer"}.get(name, "string")
    column: dict[str, Any] = {"name": name, "jsonPath": path, "type": kind}
    if description:
        column["description"] = description
    if priority:
        column["priority"] = priority
    return column


def _object_schema(resource: type[BaseModel], spec: type[BaseModel], status: type[BaseModel]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": resource.__doc__,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(spec.model_json_schema(by_alias=True)),
            "status": structural_schema(status.model_json_schema(by_alias=True)),
        },
    }


def files() -> dict[str, str]:
    """The CRDs as committed, by file name."""
    header = "# Generated from the operator's api.py by `make crds`; do not edit.\n"
    definitions = (custom_resource_definition(), scaler_definition())
    return {
        f"{names.GROUP}_{crd['spec']['names']['plural']}.yaml": header + yaml.safe_dump(crd, sort_keys=False, width=120)
        for crd in definitions
    }


def main() -> None:
    """Write the CRDs into every folder given, or with --check say which of them differ and exit 1."""
    parser = argparse.ArgumentParser(prog="python -m headrace_operator.crd", description=main.__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    args = parser.parse_args()
    wanted = {folder / name: text for folder in args.folders for name, text in files().items()}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    if args.check:
        if stale:
            sys.exit(f"out of date: {', '.join(map(str, stale))}; run `make crds` and commit")
        return
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])


if __name__ == "__main__":
    main()
