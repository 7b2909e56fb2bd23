"""The headrace command: what it prints and how it exits."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.rule_cases import resource
from tests.operator.worlds import FakeCluster, pod_status, stored

from headrace_operator import cli
from headrace_operator.report import status_table
from headrace_operator.status import as_applied


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "dd.yaml"
    path.write_text(yaml.safe_dump(resource()))
    return path


def test_validate_says_yes(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert run(capsys, "validate", str(file)) == (0, "DisaggDeployment demo is valid\n", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("kind: Pod", "needs exactly one DisaggDeployment of headrace.dev/v1alpha1, has 0 among 1 documents"),
        ("", "has 0 among 0 documents"),
        (yaml.safe_dump_all([resource(), resource()]), "has 2 among 2 documents"),
        (yaml.safe_dump(resource({"spec.engine": {"blokSize": 1}})), "spec.engine.blokSize"),
        (yaml.safe_dump({"apiVersion": "headrace.dev/v1alpha1", "kind": "DisaggDeployment"}), "metadata.name"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    code, out, err = run(capsys, "validate", str(path))
    assert (code, out) == (2, "")
    assert message in err


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "render", str(tmp_path / "none.yaml"))
    assert code == 2
    assert "No such file" in err


def test_render_prints_the_same_objects_as_yaml_and_json(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    _, as_yaml, _ = run(capsys, "render", str(file))
    _, as_json, _ = run(capsys, "render", str(file), "-o", "json")
    assert list(yaml.safe_load_all(as_yaml)) == json.loads(as_json)["items"]


def test_up_says_which_port_is_taken(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run(capsys, "up", str(file), "--base-port", str(port))
    assert code == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec.model.source": {"pvc": {"claimName": "w"}}}, "needs a cluster"),
        (
            {
                "spec.roles.0.template": {
                    "env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
                }
            },
            "env T: its valueFrom needs a cluster",
        ),
    ],
)
def test_up_refuses_what_needs_a_cluster(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "dd.yaml"
    path.write_text(yaml.safe_dump(resource(changes)))
    code, _, err = run(capsys, "up", str(path), "--base-port", "0")
    assert code == 2
    assert message in err


def test_up_says_which_program_is_missing(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    code, _, err = run(capsys, "up", str(file), "--base-port", "0", "--bin-dir", str(tmp_path))
    assert code == 2
    assert "headrace-router was not found" in err


def test_status_shows_roles_conditions_and_failures() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    for name, pod in cluster.pods().items():
        if "decode" in name:
            pod["status"] = pod_status("Failed", state={"terminated": {"exitCode": 1, "message": "no memory"}})
    cluster.run(stored())
    table = status_table({**resource(), "status": as_applied(cluster.status)})
    assert "demo  1xDP1 + 1xDP1" in table
    assert "decode   1       1       0      1" in table
    assert "Ready        False   RebuildingGroup" in table
    assert "    no memory" in table


def test_status_tells_the_count_that_a_scaler_asks_for() -> None:
    external = {"spec.scaling": {"mode": "External"}}
    cluster = FakeCluster()
    cluster.settle(stored(external))
    cluster.objects["DisaggRoleScaler", "demo-decode"]["spec"]["replicas"] = 3
    cluster.run(stored(external))
    assert "decode   3       1       1" in status_table({**resource(external), "status": as_applied(cluster.status)})


def test_status_calls_a_replacement_no_failure() -> None:
    cluster = FakeCluster()
    cluster.settle(stored())
    old = cluster.status.roles[1].revision
    cluster.run(stored({"spec.engine": {"maxSequences": 8}}))
    table = status_table({**resource(), "status": as_applied(cluster.status)})
    assert f"decode group 0 of revision {old} is leaving" in table
    assert "failed 0 times" not in table


def test_status_without_a_cluster_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, _, err = run(capsys, "status", "demo")
    assert code == 1
    assert "set KUBECONFIG" in err


@pytest.mark.parametrize("verb", ["history", "undo"])
def test_rollout_without_a_cluster_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, _, err = run(capsys, "rollout", verb, "demo")
    assert code == 1
    assert "set KUBECONFIG" in err


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "headrace up docs/examples/" in out
