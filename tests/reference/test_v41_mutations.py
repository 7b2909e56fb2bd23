"""The table of mutations stays true to the code, so that it can be run at any time (`python -m ...v41_mutations`)."""

from __future__ import annotations

import pytest
from tests.reference.v41_mutations import MUTATIONS, PACKAGE, Mutation, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_every_mutation_has_exactly_one_place(mutation: Mutation) -> None:
    text = (PACKAGE / mutation.file).read_text(encoding="utf-8")
    assert mutated(mutation, text) != text
