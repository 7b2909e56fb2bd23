"""Which API server to talk to, and as whom: a pod's service account, or a kubeconfig as kubectl reads it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import yaml
from kubernetes.aio import client, config

from headrace_operator.cluster import Cluster
from headrace_operator.cluster_errors import ClusterError

_DEFAULT_KUBECONFIG = "~/.kube/config"
_HINT = "set KUBECONFIG to a kubeconfig file"


class _PlainClient(client.ApiClient):
    """Bodies are plain data already: converting them first, which the generated client does with its models, would
    cost as much as the request."""

    def sanitize_for_serialization(self, obj: Any) -> Any:
        return obj


@asynccontextmanager
async def connect(context: str | None = None) -> AsyncIterator[Cluster]:
    """A client with the pod's service account, or else with KUBECONFIG. Closed at the end. Raises ClusterError.

    `context`: one of the kubeconfig's instead of its current one."""
    configuration = client.Configuration()
    namespace = ""
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG") and context is None:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            # A cluster's own address needs no proxy; to look for one and for ~/.netrc costs every request a thread.
            configuration.client_session_kwargs = {"trust_env": False}
        else:
            namespace = await _load(_kubeconfig(), context, configuration)
    except config.ConfigException as error:
        what = f"the kubeconfig has no context {context}" if f"name {context} in" in str(error) else str(error)
        raise ClusterError(f"no cluster: {what}; {_HINT}") from error
    configuration.connection_pool_maxsize = 0  # no bound: requests have one already, and there are few watches
    async with _PlainClient(configuration) as api:
        yield Cluster(api, namespace or "default")


def _kubeconfig() -> str:
    """Paths of kubeconfig files with colons between them, at least one of which exists."""
    # Read now: the client would take what it was when it was imported.
    paths = os.environ.get("KUBECONFIG") or _DEFAULT_KUBECONFIG
    if not any(os.path.exists(os.path.expanduser(path)) for path in paths.split(os.pathsep)):
        raise ClusterError(f"no cluster: {paths} does not exist; {_HINT}")
    return paths


async def _load(paths: str, context: str | None, configuration: client.Configuration) -> str:
    """Fill the configuration from kubeconfig files; the namespace of the context, empty if it has none."""
    try:
        loader = await config.load_kube_config(  # type: ignore[no-untyped-call]
            paths, context=context, client_configuration=configuration
        )
        return str(loader.current_context["context"].get("namespace") or "")
    except (yaml.YAMLError, AttributeError, TypeError, KeyError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ClusterError(f"no cluster: {paths} is no kubeconfig ({reason}); {_HINT}") from error
