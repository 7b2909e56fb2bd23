"""What can go wrong with a request to the API server, and what each answer of it means. Pure."""

from __future__ import annotations

import json
from typing import Any

from headrace_operator.workqueue import ExpectedError


class ClusterError(ExpectedError):
    """The API server could not be asked, or failed: worth a retry."""


class Refused(ClusterError):
    """The API server said no to this very object (quota, permission, validation): a retry alone changes nothing."""


class NamespaceGoing(Refused):
    """The namespace is being deleted: nothing can be made in it any more."""


class NameTaken(Refused):
    """An object of that name exists and belongs to someone else."""


class Exists(ClusterError):
    """An object of that name exists already."""


class WatchExpired(ClusterError):
    """The watch fell too far behind, and must begin with a new list."""


class Gone(ClusterError):
    """404, or a precondition on the uid that no longer holds."""


def error_of(status: int | None, body: str | None, reason: str | None, verb: str, what: str) -> ClusterError:
    """The error that an HTTP answer with this status, body and reason phrase stands for; `what` was asked for."""
    told = _status_object(body)
    message = f"{verb} {what}: {told.get('message') or f'{status} {reason}'}"
    if status == 410:
        return WatchExpired(message)
    if status == 404 and verb in ("get", "delete", "patch", "apply_status", "list"):
        return Gone(message)
    if status == 409 and verb == "create":
        return Exists(message)
    if status == 409 and verb in ("delete", "apply_status"):
        return Gone(message)
    causes = (told.get("details") or {}).get("causes") or ()
    if status == 403 and any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        return NamespaceGoing(message)
    if status is not None and 400 <= status < 500 and status not in (408, 409, 429):
        return Refused(message)
    return ClusterError(message)


def _status_object(body: str | None) -> dict[str, Any]:
    """The Status object of an answer; empty if the body is something else, as a proxy's."""
    try:
        found = json.loads(body or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
