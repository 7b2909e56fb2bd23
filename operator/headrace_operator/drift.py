"""Does a live object still hold what we would apply? Pure.

An object is applied again if it was rendered otherwise before (its stamp differs) or if a field of ours was changed.
Fields that others added, and those that the API server fills in, do not count. No drift means no request at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_operator import names
from headrace_operator.quantities import quantity

Body = Mapping[str, Any]

# Kinds that are written once: a new render of a pod is a new revision's business, never a patch. Only their labels and
# annotations are given back: admission may rightly have changed the rest, and the API server would refuse most of it.
# The rest of a scaler belongs to whoever scales.
_COMPANIONS = (names.COMPUTE_DOMAIN_KIND, names.WORKLOAD_KIND, names.VOLCANO_KIND)
WRITTEN_ONCE = ("Pod", "ControllerRevision", names.SCALER_KIND, *_COMPANIONS)
# Within these an added key changes the meaning of ours.
_EXACT = ("selector", "matchLabels")
_QUANTITIES = ("requests", "limits")


def has_drifted(live: Body, desired: Body) -> bool:
    """Whether `desired` must be applied over `live`."""
    if desired["kind"] in WRITTEN_ONCE:
        return not holds(_own_metadata(desired), live["metadata"]) or desired.get("revision") != live.get("revision")
    return _stamp(live) != _stamp(desired) or not holds(
        {key: value for key, value in desired.items() if key not in ("apiVersion", "kind")}, live
    )


def is_as_rendered(live: Body, desired: Body) -> bool:
    """Whether `live` was last applied as it would be now, so that what differs is somebody's edit."""
    return desired["kind"] in WRITTEN_ONCE or _stamp(live) == _stamp(desired)


def status_has_drifted(live: Body, wanted: Body) -> bool:
    """Whether the live status says less, more or other than `wanted`; other people's conditions are their own."""
    conditions = {condition["type"]: condition for condition in live.get("conditions") or ()}
    if names.SCALING_LIMITED in conditions.keys() - {condition["type"] for condition in wanted["conditions"]}:
        return True  # the mode has been changed
    others = {*live, *wanted} - {"conditions"}
    return any(conditions.get(condition["type"]) != condition for condition in wanted["conditions"]) or any(
        live.get(key, []) != wanted.get(key, []) for key in others
    )


def _stamp(body: Body) -> str | None:
    annotations = body["metadata"].get("annotations") or {}
    return annotations.get(names.ANNOTATION_APPLIED)


def metadata_repair(live: Body, desired: Body) -> dict[str, Any]:
    """What gives `live` (this very object) its labels and annotations back, and touches nothing else."""
    identity = {key: live["metadata"][key] for key in ("name", "namespace", "uid")}
    return {
        "apiVersion": desired["apiVersion"],
        "kind": desired["kind"],
        "metadata": {**identity, **_own_metadata(desired)},
        # The number of a ControllerRevision, which alone may change; left out it would be taken away.
        **({"revision": desired["revision"]} if "revision" in desired else {}),
    }


def _own_metadata(desired: Body) -> dict[str, Any]:
    """Labels and annotations, but for the stamp: it tells of the render that the object was made from."""
    annotations = {
        key: value
        for key, value in (desired["metadata"].get("annotations") or {}).items()
        if key != names.ANNOTATION_APPLIED
    }
    return {"labels": desired["metadata"]["labels"]} | ({"annotations": annotations} if annotations else {})


def holds(desired: Any, live: Any, key: str = "") -> bool:
    """Whether everything in `desired` is in `live`, at the same place and with the same meaning."""
    if desired in (None, {}, []):
        return not live or key not in _EXACT
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping) or (key in _EXACT and set(live) != set(desired)):
            return False
        as_quantity = key in _QUANTITIES
        return all(
            (_quantity(value) == _quantity(live.get(name))) if as_quantity else holds(value, live.get(name), name)
            for name, value in desired.items()
        )
    if isinstance(desired, list):
        return isinstance(live, list) and _list_holds(desired, live)
    return bool(desired == live)


def _list_holds(desired: list[Any], live: list[Any]) -> bool:
    if all(isinstance(item, Mapping) and "name" in item for item in [*desired, *live]):
        by_name = {item["name"]: item for item in live}
        return all(holds(item, by_name.get(item["name"])) for item in desired)
    return len(desired) == len(live) and all(map(holds, desired, live))


def _quantity(value: Any) -> Any:
    """A quantity as a number, so that 1000m equals 1; anything else as it is."""
    try:
        return quantity(value)
    except ValueError:
        return value
