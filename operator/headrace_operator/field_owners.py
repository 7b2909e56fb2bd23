"""Who owns the fields of an object that was created and is to be applied from now on. Pure.

Creating costs the API server half of what a server-side apply does, and needs no look at whether the name is free. But
what was created counts as written by an Update: an apply that leaves a field out would not take it away, since the
creation goes on owning it. So before the first apply what we created is declared applied, as client-go's csaupgrade
does with what kubectl has created.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_operator import names

Entry = Mapping[str, Any]  # of metadata.managedFields


def owned_by_apply(entries: Sequence[Entry]) -> list[Entry] | None:
    """The entries with what we created counted as applied; None if nothing changes."""
    created = [entry for entry in entries if _is_ours(entry, "Update")]
    if not created:
        return None
    applied = [entry for entry in entries if _is_ours(entry, "Apply")]
    fields: Mapping[str, Any] = {}
    for entry in (*applied, *created):
        fields = _union(fields, entry.get("fieldsV1") or {})
    others = [entry for entry in entries if entry not in created and entry not in applied]
    return [{**created[0], "operation": "Apply", "fieldsV1": fields}, *others]


def _is_ours(entry: Entry, operation: str) -> bool:
    is_of_object = not entry.get("subresource")
    return entry.get("manager") == names.MANAGER and entry.get("operation") == operation and is_of_object


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A set of fields is a tree of their names; both leaves and what is below them are empty objects."""
    return {key: _union(one.get(key, {}), other.get(key, {})) for key in {**one, **other}}
