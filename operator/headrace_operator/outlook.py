"""From the objects that exist to a forecast of what the operator makes of a changed resource. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_status import Status
from headrace_operator.census import Census
from headrace_operator.forecast import Forecast, forecast
from headrace_operator.forecast_nodes import NodeRoom
from headrace_operator.forecast_room import CountedRoom, RoomModel, in_use
from headrace_operator.observe import observe
from headrace_operator.planning import known_templates, role_states, strategy_of
from headrace_operator.scaling import scaled

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Scene:
    """What there is. `stored`: the deployment, None if there is none yet. `objects`: at least its children."""

    namespace: str
    stored: Body | None
    objects: Sequence[Body]
    census: Census | None = None  # of all nodes and pods of the cluster; None: not known


def outlook(wanted: DisaggDeployment, scene: Scene, now: float, num_free: int | None = None) -> Forecast:
    """What follows if `wanted` is applied at `now` (epoch seconds). `num_free`: GPUs, or pods if nothing asks for GPUs,
    for more groups; None: what the nodes have left, or where those are not known any number."""
    uid = scene.stored["metadata"]["uid"] if scene.stored else ""
    identity = {"uid": uid, "namespace": scene.namespace}
    wanted = wanted.model_copy(update={"metadata": wanted.metadata.model_copy(update=identity)})
    status = Status.model_validate((scene.stored or {}).get("status") or {})
    observed = observe(wanted.metadata.name, uid, _children(wanted.metadata.name, scene) if scene.stored else [])
    wanted = scaled(wanted, observed, status, now).deployment
    templates, revisions = known_templates(wanted, observed, engine_image="")
    states = role_states(wanted, observed, status, templates, revisions)
    room: RoomModel
    if num_free is not None or scene.census is None:
        room = CountedRoom(strategy_of(wanted), None if num_free is None else in_use(states) + num_free)
    else:
        room = NodeRoom(wanted, observed, templates, scene.census)
    return forecast(states, room, now)


def _children(name: str, scene: Scene) -> list[Body]:
    return [
        body
        for body in scene.objects
        if (body["metadata"].get("labels") or {}).get(names.LABEL_DEPLOYMENT) == name
        and body["metadata"].get("namespace", scene.namespace) == scene.namespace
    ]


def counted(objects: Sequence[Body]) -> Census | None:
    """Nodes and what the pods among `objects` take of them; None: there are no nodes. Raises ValueError, with which
    object is wrong."""
    if not any(body["kind"] == "Node" for body in objects):
        return None
    census = Census()
    for body in objects:
        see = {"Node": census.see_node, "Pod": census.see_pod}.get(body["kind"])
        try:
            if see:
                see(body)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            name = body["metadata"].get("name", "without a name")
            raise ValueError(f"{body['kind']} {name} is not as the API server has it: {error!r}") from error
    return census
