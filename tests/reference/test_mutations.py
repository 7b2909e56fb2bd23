"""The tables of mutations stay true to the code, so that they can be run at any time."""

from __future__ import annotations

import pytest
from tests.reference.mutation import PACKAGE, Mutation, mutated
from tests.reference.mutations import FAMILIES

CASES = [(family.name, mutation) for family in FAMILIES for mutation in family.mutations]


@pytest.mark.parametrize(("family", "mutation"), CASES, ids=[f"{name}: {m.what}" for name, m in CASES])
def test_every_mutation_has_exactly_one_place(family: str, mutation: Mutation) -> None:
    text = (PACKAGE / mutation.file).read_text(encoding="utf-8")
    assert mutated(mutation, text) != text
