"""Merging a user's pod overlay over a rendered pod. Pure.

Maps are merged key by key; lists whose rendered items all have a name (containers, env, ports, volumes) or a mountPath
are merged by it, and nothing rendered is lost from them; any other value is replaced. A null removes a rendered value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_operator.api_pods import PodTemplate

# Tried in this order: a volume mount has both, and two mounts of one volume are two mounts.
_IDENTITY_KEYS = ("mountPath", "name")


def with_template(spec: Mapping[str, Any], container: str, template: PodTemplate) -> dict[str, Any]:
    """A rendered pod spec with a template over it: the typed fields first, which speak of `container`, then podSpec."""
    own = {"env": list(template.env), "volumeMounts": list(template.volume_mounts)}
    fields: dict[str, Any] = {
        "nodeSelector": dict(template.node_selector),
        "tolerations": list(template.tolerations),
        "affinity": template.affinity,
        "volumes": list(template.volumes),
        "containers": [{"name": container, **_filled(own)}] if _filled(own) else [],
    }
    return dict(merged(merged(spec, _filled(fields)), template.pod_spec or {}))


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value}


def merged(base: Any, overlay: Any) -> Any:
    """`base` with `overlay` over it; neither is changed."""
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        result = {key: value for key, value in base.items() if key not in overlay}
        for key, value in overlay.items():
            if value is not None:
                result[key] = merged(base.get(key), value)
        return result
    if isinstance(base, list) and isinstance(overlay, list):
        identity = _identity_of(base)
        if identity:
            return _merged_by(identity, base, overlay)
    return overlay


def _identity_of(base: list[Any]) -> str | None:
    for key in _IDENTITY_KEYS:
        if base and all(isinstance(item, Mapping) and key in item for item in base):
            return key
    return None


def _merged_by(key: str, base: list[Any], overlay: list[Any]) -> list[Any]:
    """Base items first, in their order, each with its overlay; then the new ones."""
    over = {item[key]: item for item in overlay if isinstance(item, Mapping) and key in item}
    present = {item[key] for item in base}
    kept = [merged(item, over[item[key]]) if item[key] in over else item for item in base]
    return kept + [item for item in overlay if not isinstance(item, Mapping) or item.get(key) not in present]
