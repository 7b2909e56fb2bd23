"""A forecast for programs and for people. Pure."""

from __future__ import annotations

from typing import Any

from headrace_operator.forecast import Action, Forecast


def as_data(result: Forecast) -> dict[str, Any]:
    """The forecast as plain data."""
    return {
        "steps": [
            {
                "actions": [_action(action) for action in step.actions],
                "available": dict(step.available),
                "inUse": step.num_in_use,
                "shortage": step.shortage,
            }
            for step in result.steps
        ],
        "unit": result.unit,
        "blocked": list(result.blocked),
    }


def _action(action: Action) -> dict[str, Any]:
    return {
        "verb": action.verb,
        "role": action.group.role,
        "group": action.group.index,
        "revision": action.group.revision,
        "pods": action.num_pods,
    }


def as_text(name: str, result: Forecast, is_room_known: bool) -> str:
    """The forecast for people: one paragraph a step."""
    num_steps = len(result.steps)
    what = f"{num_steps} step{'s' if num_steps > 1 else ''}" if num_steps else "nothing to do"
    lines = [f"{name}: {'no step can be taken' if result.blocked and not num_steps else what}"]
    for number, step in enumerate(result.steps, start=1):
        counts = ", ".join(f"{role} {count}" for role, count in step.available)
        lines.append(f"{number}. meanwhile available: {counts}; in use: {step.num_in_use} {result.unit}")
        for action in step.actions:
            key = action.group
            pods = f"{action.num_pods} pod{'s' if action.num_pods > 1 else ''}"
            lines.append(f"   {action.verb:<6} {key.role} group {key.index}, revision {key.revision} ({pods})")
        if step.shortage:
            lines.append(f"   no room yet: {step.shortage}")
    lines += [f"stops there: {reason}" for reason in result.blocked]
    is_growing = any(action.verb == "make" for step in result.steps for action in step.actions)
    if not is_room_known and is_growing:
        lines.append(
            f"room for all of it is taken for granted; --free N says how many {result.unit} there are to spare"
        )
    return "\n".join(lines)
