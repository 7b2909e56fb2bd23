"""Objects of the API server read over one kept connection.

Scenarios that wait look all the time, and a kubectl for every look takes a quarter of a second of a processor to start:
three files of scenarios at a time spent half of a small machine on that.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import urllib3
from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException
from kubernetes.config import new_client_from_config

TIMEOUT_SECONDS = 30

_CORE, _APPS, _OURS = "/api/v1", "/apis/apps/v1", "/apis/headrace.dev/v1alpha1"
_DEPLOYMENTS = (_OURS, "disaggdeployments")
_IN_NAMESPACES: Mapping[str, tuple[str, str]] = {  # kind, as kubectl takes it: where it is served, its plural
    "pod": (_CORE, "pods"),
    "pods": (_CORE, "pods"),
    "service": (_CORE, "services"),
    "deployment": (_APPS, "deployments"),
    "dd": _DEPLOYMENTS,
    "disaggdeployment.headrace.dev": _DEPLOYMENTS,
}


def can_read(kind: str) -> bool:
    """Whether this file knows the kind; kubectl knows all."""
    return kind in _IN_NAMESPACES


def get(kubeconfig: Path, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
    """The object, or None when there is none. Raises RuntimeError."""
    return _read(kubeconfig, f"{_collection(kind, namespace)}/{name}")


def list_all(kubeconfig: Path, kind: str, selector: str, namespace: str) -> list[dict[str, Any]]:
    """The objects with these labels, each with its kind, as kubectl has them. Raises RuntimeError."""
    found = _read(kubeconfig, _collection(kind, namespace), [("labelSelector", selector)] if selector else [])
    if found is None:
        raise RuntimeError(f"the API server does not serve {kind}")
    own = {"apiVersion": found["apiVersion"], "kind": found["kind"].removesuffix("List")}
    return [{**own, **item} for item in found["items"]]


def _collection(kind: str, namespace: str) -> str:
    prefix, plural = _IN_NAMESPACES[kind]
    return f"{prefix}/namespaces/{namespace}/{plural}"


def _read(kubeconfig: Path, path: str, query: list[tuple[str, str]] | None = None) -> dict[str, Any] | None:
    client = _client(kubeconfig)
    accepted = {"Accept": "application/json"}
    request = client.param_serialize(
        "GET", path, query_params=query or [], header_params=accepted, auth_settings=["BearerToken"]
    )
    try:
        response = client.call_api(*request, _request_timeout=TIMEOUT_SECONDS)
        body = response.read()
    except (ApiException, urllib3.exceptions.HTTPError) as error:
        raise RuntimeError(f"{path}: {error}") from error
    if response.status == HTTPStatus.NOT_FOUND:
        return None
    if response.status != HTTPStatus.OK:
        raise RuntimeError(f"{path}: {response.status} {response.reason}: {body.decode(errors='replace')}")
    found: dict[str, Any] = json.loads(body)
    return found


@functools.cache
def _client(kubeconfig: Path) -> ApiClient:
    return new_client_from_config(str(kubeconfig), persist_config=False)
