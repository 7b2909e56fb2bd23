"""Requests whose grammar is being compiled, off the thread that runs the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headrace_engine.core import EngineRequest, RequestError
from headrace_engine.sampling.grammar import GrammarCompiler, GrammarError, Guide

COMPILE_SECONDS = 10.0  # the first grammar also waits for the vocabulary's tree

log = logging.getLogger(__name__)


@dataclass
class _Pending:
    request: EngineRequest
    guide: Future[Guide]
    deadline: float


class PendingGrammars:
    """See the module. wake: ends the rank's wait, when a grammar is done; called from the other thread."""

    def __init__(self, compiler: GrammarCompiler, wake: Callable[[], None]) -> None:
        self._compiler = compiler
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._pending: dict[str, _Pending] = {}

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def add(self, request: EngineRequest, now: float) -> None:
        guide = self._thread.submit(self._guide, request)
        self._pending[request.request_id] = _Pending(request, guide, now + COMPILE_SECONDS)
        guide.add_done_callback(lambda _: self._wake())

    def abort(self, request_id: str) -> bool:
        """Whether it was here."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.guide.cancel()
        return pending is not None

    def poll(self, now: float) -> list[tuple[EngineRequest, Guide | RequestError]]:
        """Requests that are done or late, with what came of their grammar."""
        done: list[tuple[EngineRequest, Guide | RequestError]] = []
        for pending in list(self._pending.values()):
            if pending.guide.done() or now >= pending.deadline:
                del self._pending[pending.request.request_id]
                done.append((pending.request, _result(pending)))
        return done

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _guide(self, request: EngineRequest) -> Guide:
        assert request.sampling.grammar is not None
        return Guide(self._compiler.compile(request.sampling.grammar), request.sampling.grammar_after)


def _result(pending: _Pending) -> Guide | RequestError:
    if not pending.guide.done():
        pending.guide.cancel()
        message = f"the grammar was not compiled within {COMPILE_SECONDS:g} s"
        return RequestError(503, message, "service_unavailable", "overloaded", retriable=True)
    try:
        return pending.guide.result()
    except GrammarError as error:
        return RequestError(400, f"the grammar cannot be used: {error}", param="structured_outputs")
    except Exception:
        log.exception("request %s: the grammar was not compiled", pending.request.request_id)
        return RequestError(500, "the grammar was not compiled; the engine's log has more", "server_error")
