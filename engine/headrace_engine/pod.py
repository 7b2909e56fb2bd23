"""One pod's main process: starts its ranks, watches them, and on the leader serves HTTP.

Whatever ends unexpectedly ends the pod: a rank, the control connection of a rank elsewhere, the HTTP server. Ranks
cannot outlive this process (the kernel kills them), so no half of a group is ever left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

import msgspec
from aiohttp import web

from headrace_engine.chat.formats import format_of
from headrace_engine.config import EngineConfig
from headrace_engine.models import ModelInfo, describe_config
from headrace_engine.plan import check_lengths
from headrace_engine.server.follower import follower_app
from headrace_engine.server.frontend import Frontend
from headrace_engine.server.http import Server
from headrace_engine.server.loading import Loading
from headrace_engine.server.tokenize import Tokenizer

SHUTDOWN_SECONDS = 20.0  # for ranks to leave after they were told
CLOSE_SECONDS = 2.0  # for open HTTP connections to take their last bytes
EXIT_BAD_INPUT = 2

log = logging.getLogger(__name__)


class RankProcess:
    """A rank of this pod, and what it has said of itself: how far it is with loading, and that it is ready."""

    def __init__(
        self,
        rank: int,
        process: asyncio.subprocess.Process,
        status: asyncio.StreamReader,
        on_loading: Callable[[int, Loading], None],
    ) -> None:
        self.rank = rank
        self.process = process
        self.loading: Loading | None = None
        self._on_loading = on_loading
        self._ready = asyncio.Event()
        self._watch = asyncio.create_task(self._read_status(status))

    @classmethod
    async def start(cls, config: EngineConfig, rank: int, on_loading: Callable[[int, Loading], None]) -> RankProcess:
        read_end, write_end = os.pipe()
        argv = [sys.executable, "-m", "headrace_engine.rank_main"]
        argv += [msgspec.json.encode(config).decode(), str(rank), str(write_end), str(os.getpid())]
        environment = rank_environment(os.environ, config.num_threads)
        # A session of its own: Ctrl-C at a terminal is for this process, which drains before ranks end.
        process = await asyncio.create_subprocess_exec(
            *argv, pass_fds=(write_end,), stdin=asyncio.subprocess.DEVNULL, env=environment, start_new_session=True
        )
        os.close(write_end)
        status = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(status), os.fdopen(read_end, "rb"))
        return cls(rank, process, status, on_loading)

    async def _read_status(self, status: asyncio.StreamReader) -> None:
        while line := await status.readline():
            if line == b"ready\n":
                self._ready.set()
            elif loading := Loading.from_line(line):
                self.loading = loading
                self._on_loading(self.rank, loading)

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def stop(self) -> None:
        """Kill it if it still runs, and reap it."""
        self._watch.cancel()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


def rank_environment(own: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """The environment of a rank's process. What the user has set stays.

    OpenMP's threads sleep at barriers instead of spinning: a step has dozens of barriers, and whenever cores are shared
    (other ranks, the frontend, other pods) a spinning thread takes the core from the one that it waits for. Measured
    with two threads on two busy cores: a spinning decode step takes ten times the CPU time of one thread's, a sleeping
    one a quarter more. Large tensors get huge pages, which halves the time that their first touch takes.
    """
    environment = {"OMP_NUM_THREADS": str(num_threads), "THP_MEM_ALLOC_ENABLE": "1", **own}
    if "GOMP_SPINCOUNT" not in own:
        environment.setdefault("OMP_WAIT_POLICY", "passive")
    return environment


class Pod:
    """See the module. `run` returns the process's exit code."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ranks: list[RankProcess] = []
        self._frontend: Frontend | None = None
        self._is_leaving = False
        self._exit: asyncio.Future[int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        runner: web.AppRunner | None = None
        try:
            info = describe_config(self._config.model)
            check_lengths(self._config, info.max_position, info.block_multiple)
            is_leader = self._config.is_leader
            app = self._leader_app(info) if is_leader else follower_app(self._config, self._ranks)
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_SECONDS)
            await runner.setup()
            site = web.TCPSite(runner, self._config.host, self._config.port, backlog=1024)
            await site.start()
            port = runner.addresses[0][1]
            log.info("HTTP on port %d; starting ranks %s", port, list(self._config.local_ranks))
            for rank in self._config.local_ranks:
                self._ranks.append(await RankProcess.start(self._config, rank, self._on_loading))
            for process in self._ranks:
                self._spawn(self._watch(process))
            self._spawn(self._announce(port))
            return await self._exit
        except OSError as error:
            log.error("cannot start: %s", error)
            return 1
        finally:
            await self._close(runner)

    def _leader_app(self, info: ModelInfo) -> web.Application:
        tokenizer = Tokenizer(Path(self._config.model))
        self._frontend = Frontend(self._config, lambda reason: self._fail(f"the group has failed: {reason}", 1))
        self._frontend.start()
        chat_format = format_of(info.architecture, thinks_by_default=tokenizer.thinks_by_default)
        server = Server(
            self._config,
            self._frontend,
            tokenizer,
            vocab_size=info.vocab_size,
            chat_format=chat_format,
            image_token_id=info.image_token_id,
        )
        return server.app()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_loading(self, rank: int, loading: Loading) -> None:
        if self._frontend is not None:
            self._frontend.ranks[rank].loading = loading

    async def _announce(self, port: int) -> None:
        """Say when requests are taken."""
        started = time.monotonic()
        if self._frontend is not None:
            await self._frontend.all_ready.wait()
        else:
            await asyncio.gather(*(rank.wait_ready() for rank in self._ranks))
        name, role = self._config.served_model_name, self._config.role
        log.info("ready after %.1f s: %s (%s) on port %d", time.monotonic() - started, name, role, port)

    # --- ends ---

    async def _watch(self, rank: RankProcess) -> None:
        code = await rank.process.wait()
        if self._is_leaving and code == 0:
            return
        self._fail(f"rank {rank.rank} ended with {_describe(code)}", EXIT_BAD_INPUT if code == EXIT_BAD_INPUT else 1)
        if self._frontend is not None:
            self._frontend.fail(f"rank {rank.rank} ended")

    def _fail(self, reason: str, code: int) -> None:
        if self._exit is not None and not self._exit.done():
            log.error("this pod ends: %s", reason)
            self._exit.set_result(code)

    def _on_signal(self) -> None:
        if self._is_leaving:
            self._fail("told twice to end", 1)
            return
        self._is_leaving = True
        self._spawn(self._drain())

    async def _drain(self) -> None:
        """Finish what is in flight, let the ranks leave, end with 0."""
        deadline = time.monotonic() + self._config.drain_seconds
        if self._frontend is not None:
            self._frontend.is_draining = True
            log.info("draining: %d requests in flight", self._frontend.num_in_flight)
            try:
                async with asyncio.timeout(self._frontend.drain_seconds):
                    await self._frontend.idle.wait()
            except TimeoutError:
                log.warning("%d requests were not done in time", self._frontend.num_in_flight)
                self._frontend.end_requests("this engine had to end before the request was done")
            self._frontend.shut_down_ranks()
            deadline = time.monotonic() + SHUTDOWN_SECONDS
        # A follower's ranks leave when the leader tells them; ranks that are not ready yet have nothing to finish.
        waits = [rank.process.wait() for rank in self._ranks if rank.is_ready]
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await asyncio.gather(*waits)
        except TimeoutError:
            log.warning("ranks did not leave in time")
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(0)

    async def _close(self, runner: web.AppRunner | None) -> None:
        for task in list(self._tasks):
            task.cancel()
        if runner is not None:
            await runner.cleanup()  # first: clients still get the errors that ended their requests
        await asyncio.gather(*(rank.stop() for rank in self._ranks))
        if self._frontend is not None:
            await self._frontend.close()


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
