"""Merging a user's pod overlay over a rendered pod. Pure.

Maps are merged key by key; lists whose items all have a name (containers, env, volumes) or a mountPath are merged by
it; any other value is replaced. A null removes the rendered value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Tried in this order: a volume mount has both, and two mounts of one volume are two mounts.
_IDENTITY_KEYS = ("mountPath", "name")


def merged(base: Any, overlay: Any) -> Any:
    """`base` with `overlay` over it; neither is changed."""
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        result = {key: value for key, value in base.items() if key not in overlay}
        for key, value in overlay.items():
            if value is not None:
                result[key] = merged(base.get(key), value)
        return result
    if isinstance(base, list) and isinstance(overlay, list):
        identity = _identity_of(base, overlay)
        if identity:
            return _merged_by(identity, base, overlay)
    return overlay


def _identity_of(base: list[Any], overlay: list[Any]) -> str | None:
    items = [*base, *overlay]
    for key in _IDENTITY_KEYS:
        if items and all(isinstance(item, Mapping) and key in item for item in items):
            return key
    return None


def _merged_by(key: str, base: list[Any], overlay: list[Any]) -> list[Any]:
    """Base items first, in their order, each with its overlay; then the new ones."""
    over = {item[key]: item for item in overlay}
    result = [merged(item, over.pop(item[key])) if item[key] in over else item for item in base]
    return result + [item for item in overlay if item[key] in over]
