"""What the operator measures: groups by state, the step of a roll-out, and names that Prometheus likes."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import pytest
from prometheus_client import REGISTRY, generate_latest
from tests.operator.racks import rack
from tests.operator.test_admission import World
from tests.operator.test_reconcile import FakeServer, reconciler, settle
from tests.operator.worlds import pod_status

from headrace_operator import names
from headrace_operator.figures import figures_of
from headrace_operator.metrics import Deployments
from headrace_operator.workqueue import Key, WorkQueue

KEY = Key("default", "demo")


def value(metric: str, **labels: str) -> float | None:
    where = {"namespace": "default", "deployment": "demo"}
    return REGISTRY.get_sample_value(f"headrace_operator_{metric}", where | labels)


async def test_groups_are_counted_by_state_and_the_roll_out_by_step() -> None:
    server = FakeServer({"spec.roles.0.replicas": 2})
    subject = reconciler(server)
    await settle(server, subject)
    assert value("groups", role="prefill", state="Ready") == 2
    assert value("wanted_groups", role="prefill") == value("updated_groups", role="prefill") == 2
    assert value("condition", type=names.READY) == 1
    assert server.raw is not None
    server.raw["spec"]["engine"] = {"maxSequences": 8}
    server.raw["metadata"]["generation"] = 2
    await subject.reconcile(KEY)
    assert value("updated_groups", role="prefill") == 0
    assert value("condition", type=names.READY) == 0


async def test_a_failure_shows_at_once() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    for name, pod in server.world.pods().items():
        if "decode" in name:
            pod["status"] = pod_status("Failed")
    await subject.reconcile(KEY)
    assert value("groups", role="decode", state="Ready") == 0
    assert value("groups", role="decode", state="Broken") == 1


def test_groups_that_wait_for_room_are_counted_with_their_gpus() -> None:
    """As in test_admission: of two racks with 4 GPUs each one takes the prefill group, none the decode group of 8."""
    world = World([*rack("a", 4), *rack("b", 4)])
    decision = world.step()
    roles = figures_of(world.status, decision).roles
    assert (roles["prefill"].without_room, roles["prefill"].short_gpus) == (0, 0)
    assert (roles["decode"].without_room, roles["decode"].short_gpus) == (1, 8)


async def test_a_deployment_that_is_gone_leaves_no_gauge() -> None:
    server = FakeServer()
    subject = reconciler(server)
    await settle(server, subject)
    assert value("wanted_groups", role="decode") == 1
    server.raw = None
    await subject.reconcile(KEY)
    assert value("wanted_groups", role="decode") is None


async def test_an_invalid_spec_still_has_its_conditions() -> None:
    server = FakeServer({"spec.roles": [{"name": "decode"}]})
    await reconciler(server).reconcile(KEY)
    assert value("condition", type=names.VALID) == 0
    await reconciler(FakeServer()).reconcile(KEY)


async def test_the_queue_tells_how_long_its_oldest_key_has_waited() -> None:
    queue = WorkQueue()
    assert queue.oldest_seconds() == 0.0
    queue.add(KEY)
    first = queue.oldest_seconds()
    queue.add(KEY)  # once more: it waits no shorter for that
    assert queue.oldest_seconds() >= first > 0.0


def test_its_gauges_are_described_without_any_deployment() -> None:
    assert len(list(Deployments().describe())) == len(list(Deployments().collect())) == 9


def test_prometheus_own_linter_has_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed")
    asyncio.run(reconciler(FakeServer()).reconcile(KEY))
    own = [m for m in generate_latest().decode().splitlines() if "headrace_operator" in m]
    found = subprocess.run(
        [promtool, "check", "metrics"], input="\n".join(own) + "\n", capture_output=True, text=True, timeout=30
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
