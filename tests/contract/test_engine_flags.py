"""Every command line that the operator renders is one that `headrace-engine serve` takes, and means the same there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.contract.rendered import FULL, EnginePod, deployments, engine_pods

from headrace_engine import cli, config
from headrace_engine.config import ConfigError, EngineConfig
from headrace_engine.models.rounding import FakeQuantization
from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.api_engine import _OWN_FLAGS, Engine, Transfer
from headrace_operator.groups import GroupKey
from headrace_operator.render.objects import Owner
from headrace_operator.render.pods import render_pod
from headrace_operator.render.site import local_site
from headrace_operator.revision import RoleTemplate

PODS = engine_pods()


@pytest.fixture
def folders_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is on a volume of the pod."""

    class Folder(type(Path())):  # type: ignore[misc]
        def is_dir(self) -> bool:
            return True

    monkeypatch.setattr(config, "Path", Folder)


def serve_config(argv: list[str]) -> EngineConfig:
    """What `headrace-engine` makes of a rendered command line."""
    program, *arguments = argv
    assert program == "headrace-engine"
    known, rest = cli._parser().parse_known_args(arguments)
    assert rest == []
    assert known.run is cli._serve
    return config.config_from(known)


def expected(pod: EnginePod) -> dict[str, Any]:
    """EngineConfig's fields as the resource says them."""
    spec = pod.deployment.spec
    role = spec.role(pod.role)
    assert role
    engine, parallelism, source = spec.engine, role.parallelism, spec.model.source
    several_pods = parallelism.num_pods > 1
    metadata = pod.body["metadata"]
    leader = f"{metadata['name'].rpartition('-')[0]}-0.{pod.body['spec']['subdomain']}" if several_pods else "127.0.0.1"
    return {
        "model": "" if source.tiny else f"/model/{source.pvc.path}" if source.pvc else "/model",
        "tiny": f"{source.tiny.family}:{source.tiny.seed}" if source.tiny else "",
        "served_model_name": spec.model.name,
        "role": pod.role,
        "data": parallelism.data,
        "data_local": parallelism.ranks_per_pod,
        "pod_index": pod.index,
        "expert_parallel": parallelism.expert,
        "leader_host": leader,
        "host": "0.0.0.0",
        "port": names.PORT_HTTP,
        "rendezvous_port": names.PORT_RENDEZVOUS,
        "control_port": names.PORT_CONTROL,
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "dtype": engine.dtype,
        "cache_dtype": engine.cache_dtype,
        "fake_quantization": engine.fake_quantization,
        "max_batch_tokens": engine.max_batch_tokens,
        "max_sequences": engine.max_sequences,
        "num_blocks": engine.num_blocks,
        "lease_seconds": spec.transfer.lease_seconds,
        "threads": engine.threads or 0,
        "drain_seconds": spec.drain_timeout_seconds,
    }


@pytest.mark.parametrize("pod", PODS, ids=str)
def test_the_engine_understands_what_the_resource_says(pod: EnginePod, folders_exist: None) -> None:
    found = serve_config(pod.argv)
    assert {name: getattr(found, name) for name in expected(pod)} == expected(pod)
    assert found.num_pods == int(next(e for e in pod.container["env"] if e["name"] == names.ENV_GROUP_SIZE)["value"])


def test_extra_arguments_reach_the_engine(folders_exist: None) -> None:
    pod = next(pod for pod in PODS if pod.deployment.metadata.name == FULL["metadata"]["name"])
    found = serve_config(pod.argv)
    assert (found.max_waiting, found.request_timeout_seconds) == (17, 99)


def test_the_full_resource_leaves_no_field_of_a_command_line_at_its_default(folders_exist: None) -> None:
    """Otherwise a field that is not passed on could not be told from one that is."""
    pod = next(pod for pod in PODS if str(pod) == "full-decode-1")
    found = serve_config(pod.argv)
    same = {name for name in expected(pod) if getattr(found, name) == getattr(EngineConfig(model=""), name)}
    assert same == {"tiny", "host", "port", "rendezvous_port", "control_port"}


@pytest.mark.parametrize("deployment", deployments(), ids=lambda deployment: deployment.metadata.name)
def test_local_processes_get_flags_that_the_engine_takes(deployment: DisaggDeployment, folders_exist: None) -> None:
    for role in deployment.spec.roles:
        template = RoleTemplate.of(deployment.spec, role.name)
        if template.model.source.pvc:
            template = template.model_copy(update={"model": deployments()[0].spec.model})
        site = local_site(8101, 8102, 8103, template.model.source)
        key = GroupKey(role.name, template.revision, 0)
        pod = EnginePod(deployment, role.name, 0, render_pod(Owner.of(deployment), key, 0, template, site))
        found = serve_config(pod.argv)
        assert (found.host, found.port, found.rendezvous_port, found.control_port) == ("127.0.0.1", 8101, 8102, 8103)


def test_a_host_path_is_mounted_where_the_engine_is_told_to_look() -> None:
    body = {**FULL, "spec": {**FULL["spec"], "model": {"name": "m", "source": {"hostPath": {"path": "/data/v4"}}}}}
    deployment = DisaggDeployment.from_manifest(body)
    template = RoleTemplate.of(deployment.spec, "decode")
    from headrace_operator.render.pods import engine_pod

    pod = EnginePod(
        deployment, "decode", 0, engine_pod(Owner.of(deployment), GroupKey("decode", "abc", 0), 0, template)
    )
    mount = next(mount for mount in pod.container["volumeMounts"] if mount["name"] == "model")
    assert pod.argv[pod.argv.index("--model") + 1] == mount["mountPath"]


# --- the reserved flags ---


def test_the_flags_that_extra_args_may_not_repeat_are_those_that_are_rendered() -> None:
    rendered = {word.removeprefix("--") for pod in PODS for word in pod.argv[: _own_end(pod)] if word.startswith("--")}
    assert rendered == set(_OWN_FLAGS)


def _own_end(pod: EnginePod) -> int:
    extra = pod.deployment.spec.engine.extra_args
    return len(pod.argv) - len(extra)


@pytest.mark.parametrize("flag", ["--rol=decode", "--expert", "--lease=1"])
def test_no_abbreviation_gets_round_the_reserved_flags(flag: str) -> None:
    Engine(extra_args=[flag])  # the rule knows whole names only
    _, unknown = cli._parser().parse_known_args(["serve", "--tiny", "v4:0", flag])
    assert unknown == [flag]


# --- bounds: what the API server lets through, the engine takes ---


def _bounds(model: type, field: str) -> tuple[float | None, float | None]:
    info = model.model_fields[field]  # type: ignore[attr-defined]
    constraints = [asdict(item) for item in info.metadata if hasattr(item, "__dataclass_fields__")]
    lowest = next((item["ge"] for item in constraints if "ge" in item), None)
    highest = next((item["le"] for item in constraints if "le" in item), None)
    return lowest, highest


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (Engine, "max_model_len"),
        (Engine, "block_size"),
        (Engine, "max_batch_tokens"),
        (Engine, "max_sequences"),
        (Engine, "num_blocks"),
        (Engine, "threads"),
        (Transfer, "lease_seconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_engine_takes_every_number_that_the_resource_may_have(model: type, field: str) -> None:
    lowest, highest = _bounds(model, field)
    engine_lowest, engine_highest = next((low, high) for name, low, high in config._BOUNDS if name == field)
    assert lowest is not None
    assert highest is not None
    assert engine_lowest <= lowest
    assert highest <= engine_highest


def test_both_sides_know_the_same_types() -> None:
    for field, known in (("dtype", config.DTYPES), ("cache_dtype", config.CACHE_DTYPES)):
        assert set(Engine.model_fields[field].annotation.__args__) == set(known)  # type: ignore[union-attr]
    roundings = Engine.model_fields["fake_quantization"].annotation.__args__  # type: ignore[union-attr]
    assert roundings == config.FAKE_QUANTIZATIONS == tuple(FakeQuantization)


def test_both_sides_know_the_same_tiny_families() -> None:
    from headrace_operator.api_engine import TinySource

    assert TinySource.model_fields["family"].annotation.__args__ == config.TINY_FAMILIES  # type: ignore[union-attr]


def test_a_model_name_that_begins_with_a_dash_is_refused_or_understood() -> None:
    body = {**FULL, "spec": {**FULL["spec"], "model": {"name": "-v4", "source": {"tiny": {"family": "v4"}}}}}
    try:
        deployment = DisaggDeployment.from_manifest(body)
    except ValueError:
        return
    template = RoleTemplate.of(deployment.spec, "decode")
    pod = render_pod(
        Owner.of(deployment), GroupKey("decode", "a", 0), 0, template, local_site(1, 2, 3, template.model.source)
    )
    argv = EnginePod(deployment, "decode", 0, pod).argv
    try:
        found = serve_config(argv)
    except (SystemExit, ConfigError):
        pytest.fail("the API server takes a name with which no pod can start")
    assert found.served_model_name == "-v4"
