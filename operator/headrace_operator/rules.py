"""Cross-field rules: each said once in CEL for the API server and once in Python for everyone else.

A model lists its rules in `rules`; `RuledModel` checks them after parsing and writes them into the JSON schema as
`x-kubernetes-validations`. One table of accept and reject cases (tests/operator) drives both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

VALIDATIONS_KEY = "x-kubernetes-validations"


@dataclass(frozen=True)
class Rule:
    """`cel` over `self` and `holds` over the parsed model say the same; `message` says what to do about it."""

    cel: str
    message: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class TransitionRule:
    """As Rule, over the object before (`oldSelf`) and after (`self`) an update. Only the API server sees both."""

    cel: str
    message: str
    holds: Callable[[Any, Any], bool]


class RuledModel(BaseModel):
    """Base of every spec model: camelCase outside, frozen, unknown fields refused, rules checked."""

    # Strict, as the API server is: the text "2" is no number, and yes is no truth value.
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True, extra="forbid", strict=True)

    rules: ClassVar[tuple[Rule, ...]] = ()
    transition_rules: ClassVar[tuple[TransitionRule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            if not rule.holds(self):
                raise ValueError(rule.message)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        rules: list[Rule | TransitionRule] = [*cls.rules, *cls.transition_rules]
        if rules:
            schema[VALIDATIONS_KEY] = [{"rule": rule.cel, "message": rule.message} for rule in rules]
        return schema


def broken_transitions(old: RuledModel, new: RuledModel) -> list[str]:
    """Messages of the transition rules that an update from `old` to `new` breaks."""
    return [rule.message for rule in new.transition_rules if not rule.holds(old, new)]
