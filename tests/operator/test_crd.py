"""The converter to a structural schema, and the CRD that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field

from headrace_operator.api import Spec
from headrace_operator.crd import SchemaError, custom_resource_definition, files, scaler_definition, structural_schema

ROOT = Path(__file__).parents[2]
COPIES = [ROOT / "crds", ROOT / "charts/headrace/crds"]


class Inner(BaseModel):
    size: int = 3


class Sample(BaseModel):
    optional: int | None = None
    fixed: Literal["x"] = "x"
    inner: Inner = Inner()
    many: dict[str, int] = Field(default_factory=dict)


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property of a schema with its path."""
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def test_it_says_what_pydantic_says_in_the_structural_way() -> None:
    assert structural_schema(Sample.model_json_schema()) == {
        "type": "object",
        "properties": {
            "optional": {"type": "integer"},
            "fixed": {"type": "string", "enum": ["x"], "default": "x"},
            "inner": {
                "type": "object",
                "properties": {"size": {"type": "integer", "default": 3}},
                "default": {"size": 3},
            },
            "many": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
    }


class Union(BaseModel):
    value: int | str


class Positive(BaseModel):
    value: int = Field(gt=0)


class Pair(BaseModel):
    value: tuple[int, str]


@pytest.mark.parametrize("model", [Union, Positive, Pair])
def test_it_refuses_what_a_structural_schema_cannot_say(model: type[BaseModel]) -> None:
    with pytest.raises(SchemaError):
        structural_schema(model.model_json_schema())


@pytest.mark.parametrize("folder", COPIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_committed_copies_are_up_to_date(folder: Path) -> None:
    assert {path.name: path.read_text() for path in folder.iterdir()} == files(), "run `make crds`"


@pytest.mark.parametrize(
    "definition", [custom_resource_definition(), scaler_definition()], ids=["deployment", "scaler"]
)
def test_every_field_is_described(definition: dict[str, Any]) -> None:
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    missing = [
        path
        for path, node in nodes(schema)
        if "description" not in node and path not in (".apiVersion", ".kind", ".metadata")
    ]
    assert missing == []


def test_a_scaler_has_what_autoscalers_ask_for() -> None:
    version = scaler_definition()["spec"]["versions"][0]
    scale = version["subresources"]["scale"]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    for path in scale.values():
        _, part, field = path.split(".")
        assert field in properties[part]["properties"], path
    assert properties["spec"]["required"] == ["replicas"]  # absent would read as zero through /scale


def test_every_optional_field_says_its_default() -> None:
    spec = structural_schema(Spec.model_json_schema(by_alias=True))
    required = {"spec.model", "spec.roles", ".model", ".roles"}
    missing = [
        path
        for path, node in nodes(spec)
        if "Default:" not in node.get("description", "") and "default" in node and path not in required
    ]
    assert missing == []


def test_lists_and_texts_are_bounded_so_that_rules_are_cheap() -> None:
    spec = structural_schema(Spec.model_json_schema(by_alias=True))
    unbounded = [
        path
        for path, node in nodes(spec)
        if (node.get("type") == "array" and "maxItems" not in node)
        or (node.get("type") == "string" and "maxLength" not in node and "enum" not in node)
    ]
    assert unbounded == []


def test_it_is_small_enough_for_a_client_side_apply() -> None:
    assert len(yaml.safe_dump(custom_resource_definition())) < 262_144 / 2
