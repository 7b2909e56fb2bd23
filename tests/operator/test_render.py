"""Renders: every example's objects as golden files, and what must hold for any resource."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.worlds import stored

from headrace_operator import names
from headrace_operator.decide import Defaults
from headrace_operator.groups import GroupKey
from headrace_operator.manifests import load
from headrace_operator.preview import preview
from headrace_operator.render.objects import Owner
from headrace_operator.render.overlay import merged
from headrace_operator.render.pods import EXIT_SECONDS, engine_pod, render_pod
from headrace_operator.render.router import router_objects
from headrace_operator.render.runtimes.headrace import static_router_command
from headrace_operator.render.site import local_site
from headrace_operator.revision import RoleTemplate

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
OWNER = Owner("demo", "default", "uid")


def decode_pod(changes: dict[str, Any] | None = None, index: int = 0) -> dict[str, Any]:
    template = RoleTemplate.of(stored(changes).spec, "decode").with_image("engine:1")
    return engine_pod(OWNER, GroupKey("decode", "abc", 0), index, template)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    return dict(next(c for c in pod["spec"]["containers"] if c["name"] == "engine"))


def is_recorded(body: dict[str, Any]) -> bool:
    """All but the third and further pods of a group, and groups of a role: they differ from others in numbers only."""
    labels = body["metadata"]["labels"]
    return all(int(labels.get(label, 0)) < 2 for label in (names.LABEL_GROUP, names.LABEL_POD_INDEX))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_render_as_recorded(example: Path, update_golden: bool) -> None:
    bodies = preview(load(str(example)), Defaults("headrace-engine:1", "headrace-operator:1"))
    text = yaml.safe_dump_all(filter(is_recorded, bodies), sort_keys=False, width=120)
    golden = GOLDEN / example.name
    if update_golden:
        golden.write_text(text)
    assert golden.read_text() == text, "if this is meant, run pytest --update-golden and read the difference"


def test_there_is_a_golden_file_for_every_example_and_no_other() -> None:
    assert [path.name for path in sorted(GOLDEN.iterdir())] == [path.name for path in EXAMPLES]


def test_the_same_resource_renders_to_the_same_bytes() -> None:
    assert decode_pod() == decode_pod()


@pytest.mark.parametrize(
    ("source", "arguments", "volume"),
    [
        ({"tiny": {"family": "v4", "seed": 3}}, ["--tiny", "v4:3"], None),
        (
            {"hostPath": {"path": "/data/v4"}},
            ["--model", "/model"],
            {"hostPath": {"path": "/data/v4", "type": "Directory"}},
        ),
        (
            {"pvc": {"claimName": "weights", "path": "v4/flash"}},
            ["--model", "/model/v4/flash"],
            {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
        ),
        (
            {"pvc": {"claimName": "weights"}},
            ["--model", "/model"],
            {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
        ),
    ],
)
def test_where_the_model_comes_from(source: Any, arguments: list[str], volume: dict[str, Any] | None) -> None:
    pod = decode_pod({"spec.model.source": source})
    assert container(pod)["args"][:2] == arguments
    volumes = [
        {k: v for k, v in found.items() if k != "name"} for found in pod["spec"]["volumes"] if found["name"] == "model"
    ]
    assert volumes == ([volume] if volume else [])


def test_ranks_find_their_leader_by_name() -> None:
    pod = decode_pod({"spec.roles.1.parallelism": {"data": 4, "dataLocal": 2, "expert": True}}, index=1)
    args = " ".join(container(pod)["args"])
    leader = "demo-decode-abc-0-0.demo-decode-leaders"
    assert f"--data 4 --data-local 2 --pod-index 1 --expert-parallel --leader-host {leader}" in args
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("demo-decode-abc-0-1", "demo-decode-leaders")


def test_a_group_of_one_pod_needs_no_name_service() -> None:
    args = container(decode_pod())["args"]
    assert args[args.index("--leader-host") + 1] == "127.0.0.1"


def test_drain_time_reaches_the_engine_and_leaves_room_to_exit() -> None:
    pod = decode_pod({"spec.drainTimeoutSeconds": 45})
    assert container(pod)["args"][-2:] == ["--drain-seconds", "45"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 45 + EXIT_SECONDS


def test_extra_arguments_come_last_and_as_they_were_written() -> None:
    given = ["--x", '{"a": "it\'s", "b": "$c $(D) $$"}', "back\\slash\nline", " ", "ü"]
    pod = decode_pod({"spec.engine": {"extraArgs": given}})
    assert container(pod)["args"][-5:] == given


def test_the_overlay_adds_and_the_operator_keeps_what_pods_need() -> None:
    overlay = {
        "labels": {"team": "x", names.LABEL_ROLE: "stolen"},
        "annotations": {"note": "y"},
        "nodeSelector": {"rack": "1"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "env": [{"name": "A", "value": "1"}, {"name": names.ENV_GROUP_SIZE, "value": "9"}],
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        "podSpec": {
            "priorityClassName": "high",
            "containers": [{"name": "engine", "tty": True}, {"name": "sidecar", "image": "s:1"}],
        },
    }
    pod = decode_pod({"spec.roles.1.template": overlay})
    assert pod["metadata"]["labels"]["team"] == "x"
    assert pod["metadata"]["labels"][names.LABEL_ROLE] == "decode"
    assert pod["metadata"]["annotations"]["note"] == "y"
    spec = pod["spec"]
    assert (spec["nodeSelector"], spec["priorityClassName"], spec["restartPolicy"]) == ({"rack": "1"}, "high", "Never")
    assert [c["name"] for c in spec["containers"]] == ["engine", "sidecar"]
    engine = container(pod)
    assert engine["tty"] is True
    assert engine["image"] == "engine:1"
    environment = {variable["name"]: variable.get("value") for variable in engine["env"]}
    assert (environment["A"], environment[names.ENV_GROUP_SIZE]) == ("1", "9")
    assert {m["mountPath"] for m in engine["volumeMounts"]} == {"/dev/shm", "/cache"}


def router_deployment(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    bodies = router_objects(OWNER, stored(changes).spec, "router:1")
    return next(dict(body["spec"]) for body in bodies if body["kind"] == "Deployment")


@pytest.mark.parametrize("drain", [0, 30, 3600])
def test_a_router_pod_may_live_as_long_as_its_drain_takes(drain: int) -> None:
    spec = router_deployment({"spec.drainTimeoutSeconds": drain})["template"]["spec"]
    (router,) = spec["containers"]
    told = int(router["args"][router["args"].index("--drain-seconds") + 1])
    assert told == max(1, drain)  # it takes no zero
    before = int(router["args"][router["args"].index("--leave-seconds") + 1])
    assert before >= 2  # for the nodes to forget it
    assert spec["terminationGracePeriodSeconds"] >= before + told + 6  # what it needs to tell its last clients


def test_a_new_router_is_ready_before_an_old_one_goes() -> None:
    assert router_deployment()["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_routers_of_a_new_revision_spread_among_themselves() -> None:
    spec = router_deployment({"spec.router": {"replicas": 2}})
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"] == spec["selector"]
    assert spread["matchLabelKeys"] == ["pod-template-hash"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"  # a cluster may have one node only


def test_a_router_leaves_a_silent_node_as_soon_as_engines_do() -> None:
    changes = {"spec.restartPolicy": {"nodeLossSeconds": 45}}
    given = {"key": "node.kubernetes.io/not-ready", "operator": "Exists"}  # stays for ever where it is not ready
    template = {"tolerations": [given]}
    for added, expected in (({}, [45, 45]), ({"spec.router": {"template": template}}, [None, 45])):
        spec = router_deployment(changes | added)["template"]["spec"]
        assert [toleration.get("tolerationSeconds") for toleration in spec["tolerations"]] == expected


def test_a_template_adds_to_the_router_too() -> None:
    template = {
        "labels": {"team": "x", names.LABEL_COMPONENT: "stolen"},
        "annotations": {"note": "y"},
        "nodeSelector": {"pool": "cpu"},
        "env": [{"name": "A", "value": "1"}],
        "podSpec": {"imagePullSecrets": [{"name": "registry"}]},
    }
    deployment = router_deployment({"spec.router": {"template": template}})
    pod = deployment["template"]
    assert pod["metadata"]["labels"].items() >= {"team": "x", **deployment["selector"]["matchLabels"]}.items()
    assert pod["metadata"]["annotations"] == {"note": "y"}
    assert pod["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    (router,) = pod["spec"]["containers"]
    assert router["env"] == [{"name": "A", "value": "1"}]
    assert router["image"] == "router:1"


def test_gpus_become_a_limit() -> None:
    resources = {"spec.roles.1.resources": {"gpu": 1, "requests": {"cpu": 4}}}
    assert container(decode_pod(resources))["resources"] == {"requests": {"cpu": 4}, "limits": {"nvidia.com/gpu": 1}}


def test_local_pods_differ_only_in_addresses_ports_and_model_folder() -> None:
    template = RoleTemplate.of(stored({"spec.model.source": {"hostPath": {"path": "/data/v4"}}}).spec, "decode")
    site = local_site(9001, 9002, 9003, template.model.source)
    local = container(render_pod(OWNER, GroupKey("decode", "abc", 0), 0, template, site))["args"]
    cluster = container(engine_pod(OWNER, GroupKey("decode", "abc", 0), 0, template))["args"]
    assert {a: b for a, b in zip(cluster, local, strict=True) if a != b} == {
        "/model": "/data/v4",
        "0.0.0.0": "127.0.0.1",
        "8000": "9001",
        "29500": "9002",
        "29501": "9003",
    }


def test_a_claim_cannot_be_served_locally() -> None:
    template = RoleTemplate.of(stored({"spec.model.source": {"pvc": {"claimName": "w"}}}).spec, "decode")
    with pytest.raises(ValueError, match="needs a cluster"):
        local_site(1, 2, 3, template.model.source)


def test_the_static_router_lists_its_leaders() -> None:
    command = static_router_command("m", "127.0.0.1", 8000, 30, [("prefill", "http://a"), ("decode", "http://b")])
    assert command[-4:] == ["--static", "prefill=http://a", "--static", "decode=http://b"]


@pytest.mark.parametrize(
    ("base", "overlay", "result"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": 1}, {"a": None}, {}),
        ([1, 2], [3], [3]),
        (
            [{"name": "a", "x": 1}],
            [{"name": "a", "y": 2}, {"name": "b"}],
            [{"name": "a", "x": 1, "y": 2}, {"name": "b"}],
        ),
        (
            [{"name": "v", "mountPath": "/a"}],
            [{"name": "v", "mountPath": "/b"}],
            [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}],
        ),
        ([{"key": "a"}], [{"key": "b"}], [{"key": "b"}]),
        # Nothing that was rendered is lost for want of a name.
        ([{"name": "http", "port": 1}], [{"port": 2}], [{"name": "http", "port": 1}, {"port": 2}]),
        ([{"name": "a"}], [], [{"name": "a"}]),
    ],
)
def test_merging(base: Any, overlay: Any, result: Any) -> None:
    assert merged(base, overlay) == result
