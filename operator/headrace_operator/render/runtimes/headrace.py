"""The command lines of headrace-engine and headrace-router, from the template and the site. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_operator.render.site import Site
from headrace_operator.revision import RoleTemplate

ENGINE = "headrace-engine"
ROUTER = "headrace-router"
# From SIGTERM on: the Service's rules on every node forget the pod, so that no new connection meets a closed port, and
# clients that keep their connections are asked to make new ones.
ROUTER_LEAVE_SECONDS = 5


def engine_command(template: RoleTemplate, role: str, pod: int, site: Site) -> list[str]:
    """Program and arguments of pod `pod` of a group of `role`."""
    engine = template.engine
    parallelism = template.parallelism
    tiny = template.model.source.tiny
    model = ["--tiny", f"{tiny.family}:{tiny.seed}"] if tiny else ["--model", site.model_dir]
    command = [ENGINE, "serve", *model]
    command += ["--served-model-name", template.model.name, "--role", role]
    command += ["--data", str(parallelism.data), "--data-local", str(parallelism.ranks_per_pod)]
    command += ["--pod-index", str(pod)]
    if parallelism.expert:
        command += ["--expert-parallel"]
    command += ["--leader-host", site.leader_host, "--host", site.host, "--port", str(site.http_port)]
    command += ["--rendezvous-port", str(site.rendezvous_port), "--control-port", str(site.control_port)]
    command += ["--max-model-len", str(engine.max_model_len), "--block-size", str(engine.block_size)]
    command += ["--dtype", engine.dtype, "--cache-dtype", engine.cache_dtype]
    command += ["--fake-quantization", engine.fake_quantization]
    command += ["--max-batch-tokens", str(engine.max_batch_tokens), "--max-sequences", str(engine.max_sequences)]
    command += ["--num-blocks", str(engine.num_blocks), "--lease-seconds", str(template.transfer.lease_seconds)]
    if engine.threads is not None:
        command += ["--threads", str(engine.threads)]
    command += ["--drain-seconds", str(template.drain_timeout_seconds)]
    return command + list(engine.extra_args)


def following_router_command(
    model: str, host: str, port: int, drain_seconds: int, namespace: str, deployment: str
) -> list[str]:
    """A router that follows the deployment's EndpointSlices."""
    command = _router_command(model, host, port, drain_seconds)
    command += ["--leave-seconds", str(ROUTER_LEAVE_SECONDS)]
    return [*command, "--namespace", namespace, "--deployment", deployment]


def static_router_command(
    model: str, host: str, port: int, drain_seconds: int, leaders: Sequence[tuple[str, str]]
) -> list[str]:
    """A router over a fixed list of (role, URL of a group's leader)."""
    command = _router_command(model, host, port, drain_seconds)
    for role, url in leaders:
        command += ["--static", f"{role}={url}"]
    return command


def _router_command(model: str, host: str, port: int, drain_seconds: int) -> list[str]:
    # The router wants a moment at least, in which it tells its clients that it goes.
    drain = str(max(1, drain_seconds))
    return [ROUTER, "--host", host, "--port", str(port), "--model", model, "--drain-seconds", drain]
