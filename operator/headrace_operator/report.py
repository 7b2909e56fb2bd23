"""A deployment's status as text for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_operator.api_status import AutoScalingStatus, Status


def status_table(body: Mapping[str, Any]) -> str:
    """Roles, conditions and rebuilt groups as aligned columns; ends with a line break."""
    status = Status.model_validate(body.get("status") or {})
    topology = status.summary.topology if status.summary else ""
    parts = [f"{body['metadata']['name']}  {topology}".rstrip()]
    roles: list[tuple[str, ...]] = [("ROLE", "WANTED", "GROUPS", "READY", "UPDATED", "REVISION")]
    roles += [
        (r.name, str(r.replicas or 0), str(r.groups), str(r.ready_groups), str(r.updated_groups), r.revision)
        for r in status.roles
    ]
    parts.append(_aligned(roles))
    rows: list[tuple[str, ...]] = [("CONDITION", "STATUS", "REASON", "MESSAGE")]
    rows += [(c.type, c.status, c.reason, c.message.partition("\n")[0]) for c in status.conditions]
    parts.append(_aligned(rows))
    if status.autoscaling:
        parts.append(_autoscaling(status.autoscaling))
    for rebuild in status.rebuilds:
        what = f"failed {rebuild.failures} times in a row, last" if rebuild.failures else "is made again since"
        if rebuild.failures == 1:
            what = "failed once,"
        if rebuild.given_up:
            what = f"given up after {rebuild.failures - 1} restarts, the last"
        head = f"{rebuild.role} group {rebuild.group}: {what} {rebuild.last_time}"
        parts.append(f"{head}\n{_indented(rebuild.message)}")
    if status.leaving:
        parts.append(
            "\n".join(
                f"{left.role} group {left.group} of revision {left.revision} is leaving" for left in status.leaving
            )
        )
    return "\n\n".join(parts) + "\n"


def _autoscaling(auto: AutoScalingStatus) -> str:
    lines = [f"auto scaling: {auto.state} ({auto.last_time})", _indented(auto.message)]
    if auto.last_move:
        lines += [f"last move {auto.last_move}", _indented(auto.last_move_message or "")]
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
