"""`headrace up`: run a deployment's pods and its router as local processes, and keep its groups whole.

The pods are the operator's own renders with local addresses, and what to start and stop is decided by the operator's
own `plan_deployment`; this loop only stands in for the API server and the kubelets. It starts programs, it never
imports them.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from headrace_operator import names
from headrace_operator.api import DisaggDeployment
from headrace_operator.groups import GroupKey, Rebuild, RoleState, Strategy
from headrace_operator.local.pods import LocalPod, environment_of, local_command, local_environment, not_run_here
from headrace_operator.local.ports import HOST, assign
from headrace_operator.local.process import LocalProcess, find_program
from headrace_operator.plans import Creation, Deletion
from headrace_operator.render.objects import Owner
from headrace_operator.render.pods import EXIT_SECONDS, render_pod
from headrace_operator.render.runtimes.headrace import ROUTER, static_router_command
from headrace_operator.render.site import local_site
from headrace_operator.revision import RoleTemplate
from headrace_operator.rollout import plan_deployment

POLL_SECONDS = 0.2
_PROBE_TIMEOUT_SECONDS = 2.0


class PodFailed(Exception):
    """A process ended before the deployment was ready, or the router ended at all; the text has its last log lines."""


def say(message: str) -> None:
    """Progress, for people."""
    print(f"headrace: {message}", file=sys.stderr, flush=True)


class LocalDeployment:
    """All processes of one deployment. Raises ValueError or OSError at once if it cannot run here."""

    def __init__(self, deployment: DisaggDeployment, base_port: int, bin_dir: Path | None) -> None:
        self._deployment = deployment
        self._bin_dir = bin_dir
        self._owner = Owner.of(deployment)
        self._templates: dict[str, RoleTemplate] = {
            role.name: RoleTemplate.of(deployment.spec, role.name) for role in deployment.spec.roles
        }
        places: list[tuple[str, int, int]] = [
            (role.name, group, pod)
            for role in deployment.spec.roles
            for group in range(role.replicas)
            for pod in range(role.parallelism.num_pods)
        ]
        self._router_port, ports = assign(len(places), base_port)
        self._ports = dict(zip(places, ports, strict=True))
        self._pods: dict[tuple[str, int, int], LocalPod] = {}
        self._rebuilds: dict[str, dict[GroupKey, Rebuild]] = {role.name: {} for role in deployment.spec.roles}
        self._router: LocalProcess | None = None
        self._router_program = find_program(ROUTER, bin_dir)
        self._router_environment = environment_of(
            deployment.spec.router.template.env,
            {"name": names.router_name(self._owner.name), "namespace": self._owner.namespace},
        )
        self._check_pods()
        self._log_dir = Path(tempfile.mkdtemp(prefix=f"headrace-{self._owner.name}-"))
        self._started_at = time.monotonic()
        self._was_ready = False

    def _check_pods(self) -> None:
        """Find out before anything is started what cannot be run here."""
        for role, group, index in self._ports:
            key = GroupKey(role, self._templates[role].revision, group)
            body = self._render(key, index)
            find_program(local_command(body, local_environment(body))[0], self._bin_dir)
            if group == index == 0 and (others := not_run_here(body)):
                say(f"{role}: containers besides the engine are not run here: {', '.join(others)}")

    async def run(self, stop: asyncio.Event, kill: asyncio.Event) -> None:
        """Until `stop`; all processes are ended (at once if `kill`) before it returns or raises PodFailed."""
        say(f"logs are in {self._log_dir}")
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                await self._start_router()
                while not stop.is_set():
                    await self._step(session)
                    try:
                        await asyncio.wait_for(stop.wait(), POLL_SECONDS)
                    except TimeoutError:
                        continue
        finally:
            await self._stop_all(kill)

    async def _start_router(self) -> None:
        leaders = [(role, f"http://{HOST}:{ports.http}") for (role, _, pod), ports in self._ports.items() if pod == 0]
        model, drain = self._deployment.spec.model.name, self._deployment.spec.drain_timeout_seconds
        _, *arguments = static_router_command(model, HOST, self._router_port, drain, leaders)
        log = self._log_dir / f"{names.router_name(self._owner.name)}.log"
        self._router = await LocalProcess.start([self._router_program, *arguments], self._router_environment, log)

    async def _step(self, session: aiohttp.ClientSession) -> None:
        """Look at every process, then do what the plan says."""
        now = time.time()
        await asyncio.gather(*(self._probe(session, pod) for pod in self._pods.values()))
        self._check_deaths()
        for place, pod in list(self._pods.items()):
            pod.kill_if_late(now)
            if pod.deadline is not None and pod.process.exit_code is not None:
                await pod.process.wait()
                del self._pods[place]  # deleted and gone; one that ended by itself stays, as Failed
        await self._plan(now)
        if not self._was_ready and self._all_ready() and await _answers(session, self._router_url):
            self._was_ready = True
            say(f"ready after {time.monotonic() - self._started_at:.1f} s")
            print(json.dumps(self._description()), flush=True)

    async def _probe(self, session: aiohttp.ClientSession, pod: LocalPod) -> None:
        if pod.process.exit_code is not None or pod.deadline is not None:
            return
        is_ready = await _answers(session, pod.url)
        if is_ready and not pod.is_ready:
            pod.ready_since = time.time()
            say(f"{pod.name} is ready after {pod.ready_since - pod.started_at:.1f} s")
        pod.is_ready = is_ready

    def _check_deaths(self) -> None:
        router = self._router
        if router is not None and router.exit_code is not None:
            raise PodFailed(f"the router exited with code {router.exit_code}\n{router.tail()}")
        if self._was_ready:
            return
        for pod in self._pods.values():
            if pod.process.exit_code is not None and pod.deadline is None:
                trouble = pod.observed().trouble
                raise PodFailed(trouble.message if trouble else pod.name)

    async def _plan(self, now: float) -> None:
        plans = plan_deployment([self._role_state(role) for role in self._templates], Strategy(), now)
        for role, plan in plans.items():
            self._rebuilds[role] = dict(plan.rebuilds)
            for note in plan.notes:
                say(note.message)
            for deletion in plan.delete:
                self._delete(deletion, self._templates[role])
            for creation in plan.create:
                await self._create(creation)

    def _role_state(self, role: str) -> RoleState:
        template = self._templates[role]
        groups: dict[GroupKey, list[LocalPod]] = {}
        for (of, _, _), pod in sorted(self._pods.items()):
            if of == role:
                groups.setdefault(pod.key, []).append(pod)
        spec = self._deployment.spec.role(role)
        return RoleState(
            role=role,
            revision=template.revision,
            replicas=spec.replicas if spec else 0,
            groups={key: tuple(pod.observed() for pod in pods) for key, pods in groups.items()},
            sizes={template.revision: template.parallelism.num_pods},
            rebuilds=self._rebuilds[role],
            restarts=self._deployment.spec.restart_policy.as_rules(self._owner.name),
        )

    async def _create(self, creation: Creation) -> None:
        key = creation.key
        for index in creation.pods:
            ports = self._ports[key.role, key.index, index]
            body = self._render(key, index)
            pod = await LocalPod.start(key, index, body, ports, self._log_dir, self._bin_dir)
            self._pods[key.role, key.index, index] = pod

    def _render(self, key: GroupKey, index: int) -> dict[str, Any]:
        template = self._templates[key.role]
        own, leader = self._ports[key.role, key.index, index], self._ports[key.role, key.index, 0]
        site = local_site(own.http, leader.rendezvous, leader.control, template.model.source)
        return render_pod(self._owner, key, index, template, site)

    def _delete(self, deletion: Deletion, template: RoleTemplate) -> None:
        grace = deletion.grace_seconds
        for pod in self._pods.values():
            if pod.uid == deletion.uid:
                pod.stop(template.drain_timeout_seconds + EXIT_SECONDS if grace is None else grace)

    async def _stop_all(self, kill: asyncio.Event) -> None:
        """End everything: SIGTERM to all, SIGKILL to what is left after the drain time, or on `kill`."""
        processes = [pod.process for pod in self._pods.values()] + ([self._router] if self._router else [])
        running = [process for process in processes if process.exit_code is None]
        if running:
            say(f"stopping {len(running)} processes")
        for process in running:
            process.signal(signal.SIGTERM)
        grace = self._deployment.spec.drain_timeout_seconds + EXIT_SECONDS if self._was_ready else EXIT_SECONDS
        ended: asyncio.Future[Any] = asyncio.gather(*(process.wait() for process in processes))
        told: asyncio.Future[Any] = asyncio.ensure_future(kill.wait())
        try:
            await asyncio.wait([ended, told], timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            if not ended.done():
                for process in processes:
                    process.signal(signal.SIGKILL)
            await ended

    def _all_ready(self) -> bool:
        return len(self._pods) == len(self._ports) and all(pod.is_ready for pod in self._pods.values())

    @property
    def _router_url(self) -> str:
        return f"http://{HOST}:{self._router_port}"

    def _description(self) -> dict[str, object]:
        return {
            "router": self._router_url,
            "pods": [
                {
                    "name": pod.name,
                    "role": pod.key.role,
                    "group": pod.key.index,
                    "index": pod.index,
                    "pid": pod.process.pid,
                    "url": pod.url,
                    "log": str(pod.process.log),
                }
                for pod in self._pods.values()
            ],
        }


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether /ready says 200."""
    try:
        async with session.get(f"{url}/ready") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
