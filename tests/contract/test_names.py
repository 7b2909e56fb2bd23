"""Ports, environment, defaults and times that operator, chart and engine each write down for themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.contract.rendered import ROOT, deployments, engine_pods, router_argv, router_pod_spec

from headrace_engine import cli as engine_cli
from headrace_engine import pod as engine_pod
from headrace_engine.config import EngineConfig
from headrace_engine.router import app as router_app
from headrace_engine.router import cli as router_cli
from headrace_operator import main as operator_main
from headrace_operator import names
from headrace_operator.api_engine import Transfer

ENGINE = ROOT / "engine/headrace_engine"
OPERATOR = ROOT / "operator/headrace_operator"
CHART = ROOT / "charts/headrace"


def test_ports_of_the_engine_by_default_are_those_that_the_operator_gives() -> None:
    config = EngineConfig(model="x")
    assert (config.port, config.rendezvous_port, config.control_port) == (
        names.PORT_HTTP, names.PORT_RENDEZVOUS, names.PORT_CONTROL,
    )  # fmt: skip
    assert router_cli.parser().parse_args([]).port == names.PORT_HTTP


def test_the_operators_port_is_the_charts_and_the_documents() -> None:
    assert operator_main._parse([]).metrics_port == names.PORT_OPERATOR
    assert f"containerPort: {names.PORT_OPERATOR}" in (CHART / "templates/deployment.yaml").read_text()
    ports = (ROOT / "docs/architecture.md").read_text().split("\nPorts: ")[1].split("\nExit codes")[0]
    assert [int(port) for port in re.findall(r"\b\d{4,5}\b", ports)] == [
        names.PORT_HTTP, names.PORT_RENDEZVOUS, names.PORT_CONTROL, names.PORT_OPERATOR,
    ]  # fmt: skip


def environment_read(folder: Path) -> set[str]:
    """Variables of ours that Python files below `folder` read from the environment."""
    read = re.compile(r"environ(?:\.get\(|\[)\s*[\"']((?:HEADRACE|LWS)_\w+)")
    return {name for path in folder.rglob("*.py") for name in read.findall(path.read_text())}


def test_the_engine_reads_only_variables_that_its_pods_have_or_that_are_documented_knobs() -> None:
    given = {entry["name"] for pod in engine_pods() for entry in pod.container["env"]}
    knobs = {"HEADRACE_KERNELS", "HEADRACE_KERNEL_CACHE"}  # set by people, in docstrings of kernels/
    assert "HEADRACE_POD_NAME" in environment_read(ENGINE)
    assert environment_read(ENGINE) <= given | knobs


def test_the_chart_sets_the_variables_that_the_operator_reads() -> None:
    text = (CHART / "templates/deployment.yaml").read_text()
    assert set(re.findall(r"name: (HEADRACE_\w+)", text)) == {names.ENV_ENGINE_IMAGE, names.ENV_ROUTER_IMAGE}


def test_documented_labels_and_variables_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    words = set(re.findall(r"`((?:HEADRACE|LWS)_\w+)`", text))
    assert words == {value for name, value in vars(names).items() if name.startswith("ENV_") and "IMAGE" not in name}
    for label in (names.LABEL_DEPLOYMENT, names.LABEL_ROLE, names.LABEL_REVISION, names.LABEL_GROUP):
        assert label.removeprefix(f"{names.GROUP}/") in text


def test_every_program_that_is_rendered_is_installed_by_the_package() -> None:
    scripts = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[1].split("\n\n")[0]
    rendered = {pod.argv[0] for pod in engine_pods()} | {router_argv(item)[0] for item in deployments()}
    assert rendered == {"headrace-engine", "headrace-router"}
    assert rendered <= set(re.findall(r"^([\w-]+) = ", scripts, re.MULTILINE))


# --- times ---


def test_an_engine_has_time_to_end_after_its_drain() -> None:
    own_seconds = engine_pod.SHUTDOWN_SECONDS + engine_pod.CLOSE_SECONDS
    for pod in engine_pods():
        drain_seconds = pod.deployment.spec.drain_timeout_seconds
        assert pod.body["spec"]["terminationGracePeriodSeconds"] >= drain_seconds + own_seconds


def test_a_router_has_time_to_end_after_its_drain() -> None:
    for deployment in deployments():
        spec = router_pod_spec(deployment)
        flags = router_cli.parser().parse_args(router_argv(deployment)[1:])
        own_seconds = flags.leave_seconds + flags.drain_seconds + 2 * router_app.STOP_SECONDS
        assert spec["terminationGracePeriodSeconds"] >= own_seconds


def test_a_router_drains_as_long_as_the_engines_behind_it() -> None:
    for deployment in deployments():
        drain_seconds = router_cli.parser().parse_args(router_argv(deployment)[1:]).drain_seconds
        assert drain_seconds == deployment.spec.drain_timeout_seconds


def test_a_lease_is_as_long_by_default_with_and_without_the_operator() -> None:
    assert Transfer().lease_seconds == EngineConfig(model="x").lease_seconds


# --- exit codes ---


def test_exit_codes_are_the_documented_ones() -> None:
    text = " ".join((ROOT / "docs/architecture.md").read_text().split())
    assert "Exit codes: 0 after a drain, 2 for bad flags or a bad checkpoint" in text
    assert "exit codes: 0 after a drain, 2 for a bad flag or checkpoint, 1 for anything else" in engine_cli._SERVE_HELP
    assert engine_cli.EXIT_BAD_INPUT == engine_pod.EXIT_BAD_INPUT == 2


@pytest.mark.parametrize("flags", [["--tiny", "v4"], ["--model", "/no/such/folder"], ["--tiny", "v4:0", "--data=0"]])
def test_a_bad_flag_ends_the_engine_with_2_before_anything_starts(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine_cli.main(["serve", *flags]) == 2
    assert capsys.readouterr().err.startswith("headrace-engine serve: ")
