"""The leader's HTTP routes. Every refusal is an OpenAI error body with its real status."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from headrace_engine.chat.formats import ChatFormat
from headrace_engine.config import EngineConfig
from headrace_engine.core import Leg, RequestError, Role
from headrace_engine.messages import RankState
from headrace_engine.sampling.grammar import GrammarCompiler
from headrace_engine.server.anthropic_request import read_count, read_messages
from headrace_engine.server.asked import Asked
from headrace_engine.server.chat import plan_chat
from headrace_engine.server.errors import ApiError, bad_request, error_response, from_http_exception
from headrace_engine.server.frontend import Frontend
from headrace_engine.server.handle import RankView
from headrace_engine.server.job import ModelCard, encode_chat, read_job
from headrace_engine.server.legs import Legs
from headrace_engine.server.metrics import CONTENT_TYPE, Metrics
from headrace_engine.server.openai_request import read_chat, read_completion
from headrace_engine.server.prompts import PromptEncoder
from headrace_engine.server.responses_request import read_responses
from headrace_engine.server.structured import GrammarDoor
from headrace_engine.server.tokenize import Tokenizer
from headrace_engine.server.tokens import detokenize, tokenize

MAX_BODY_BYTES = 64 << 20
MAX_DIGITS_OF_SECONDS = 5  # a day
_ID = web.RequestKey("request_id", str)
_LEGS = {None: Leg.WHOLE, "decode": Leg.DECODE, "prefill": Leg.PREFILL}
_LEG_OF_ROLE = {Role.UNIFIED: Leg.WHOLE, Role.DECODE: Leg.DECODE, Role.PREFILL: Leg.PREFILL}

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The OpenAI surface over a frontend, and what operators and dashboards read."""

    def __init__(
        self,
        config: EngineConfig,
        frontend: Frontend,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        chat_format: ChatFormat,
        image_token_id: int | None = None,
    ) -> None:
        self._config = config
        self._frontend = frontend
        self._encoder = PromptEncoder(tokenizer)
        self._vocab_size = vocab_size
        self._chat_format = chat_format
        self._image_token_id = image_token_id
        self._grammars = GrammarDoor(GrammarCompiler(tokenizer.file, vocab_size, ()))
        self._metrics = Metrics(config.served_model_name, frontend)
        self._legs = Legs(frontend, tokenizer, self._metrics)
        self._started = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_identify, self._answer_errors])
        app.on_response_prepare.append(_echo_id)
        app.on_cleanup.append(self._close)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._serving(read_completion)),
                web.post("/v1/chat/completions", self._serving(read_chat)),
                web.post("/v1/responses", self._serving(read_responses)),
                web.post("/v1/messages", self._serving(read_messages)),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/state", self._state),
                web.get("/metrics", self._scrape),
                web.post("/drain", self._drain),
            ]
        )
        return app

    async def _close(self, _: web.Application) -> None:
        self._grammars.close()

    # --- inference ---

    def _serving(self, read: Callable[[bytes], Asked]) -> Handler:
        """The handler of one API's requests. read: raises ApiError (400)."""

        async def serve(request: web.Request) -> web.StreamResponse:
            return await self._serve(request, read)

        return serve

    async def _serve(self, request: web.Request, read: Callable[[bytes], Asked]) -> web.StreamResponse:
        arrived_at = time.perf_counter()
        leg = self._leg(request)
        job = await read_job(
            read(await _read(request)),
            label=request[_ID],
            leg=leg,
            card=self._card(),
            encoder=self._encoder,
            grammars=self._grammars,
            arrived_at=arrived_at,
        )
        if leg is Leg.DECODE:
            return await self._legs.decode(request, job)
        if leg is Leg.PREFILL:
            return await self._legs.prefill(job)
        return await self._legs.whole(request, job)

    def _card(self) -> ModelCard:
        """Raises ApiError (503) before the group is ready."""
        return ModelCard(
            self._config.served_model_name,
            self._vocab_size,
            self._frontend.max_model_len,
            self._chat_format,
            self._image_token_id,
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        return _json(await tokenize(await _read(request), self._card(), self._encoder))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        card = self._card()
        body = read_count(await _read(request))
        card.check_name(body.model)
        token_ids = await encode_chat(plan_chat(body, card.chat_format), self._encoder)
        return _json({"input_tokens": len(token_ids)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return _json(detokenize(await _read(request), self._card(), self._encoder))

    def _leg(self, request: web.Request) -> Leg:
        name = request.headers.get("x-headrace-leg")
        leg = _LEGS.get(name)
        if leg is None:
            raise bad_request(f"x-headrace-leg: {name!r} is neither decode nor prefill")
        role = self._config.role
        if leg is not _LEG_OF_ROLE[role]:
            what = "whole requests" if leg is Leg.WHOLE else f"{leg} legs"
            raise bad_request(
                f"this is a {role} engine, it takes no {what}; send requests to the router", code="wrong_role"
            )
        return leg

    async def _models(self, _: web.Request) -> web.Response:
        card: dict[str, Any] = {
            "id": self._config.served_model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "headrace",
            "max_model_len": self._frontend.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    # --- operation ---

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def _ready(self, _: web.Request) -> web.Response:
        if self._frontend.is_ready:
            return _json({"status": "ready"})
        num_ready = sum(view.hello is not None for view in self._frontend.ranks)
        reason = "draining" if self._frontend.is_draining else f"{num_ready} of {self._config.data} ranks are ready"
        return _json({"status": "not ready", "reason": reason}, status=503)

    async def _drain(self, request: web.Request) -> web.Response:
        """Take no new requests; those in flight go on. The process stays until it is told to end; then it gives them
        `?seconds=` more, if that is said, or as long as its flag says."""
        seconds = request.query.get("seconds")
        if seconds is not None:
            if not seconds.isdecimal() or len(seconds) > MAX_DIGITS_OF_SECONDS:
                raise bad_request(f"seconds must be a whole number of seconds, not {seconds[:80]!r}")
            self._frontend.drain_seconds = float(seconds)
        self._frontend.is_draining = True
        return _json({"draining": True, "in_flight": self._frontend.num_in_flight})

    async def _scrape(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _state(self, _: web.Request) -> web.Response:
        frontend, config, now = self._frontend, self._config, time.monotonic()
        return _json(
            {
                "model": config.served_model_name,
                "role": config.role.value,
                "pod_index": config.pod_index,
                "ready": frontend.is_ready,
                "draining": frontend.is_draining,
                "in_flight": frontend.num_in_flight,
                "fingerprint": frontend.fingerprint,
                "recent": self._metrics.recent.state(now),
                "ranks": [_rank_state(view, now) for view in frontend.ranks],
            }
        )

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            self._metrics.failed(error.error.status)
            return error_response(error.error, request.path)
        except web.HTTPException as error:
            return error_response(from_http_exception(error), request.path)
        except ConnectionResetError:
            raise  # the client has left; there is nobody to answer
        except Exception:
            log.exception("request %s failed", request[_ID])
            self._metrics.failed(500)
            fault = RequestError(500, "internal error; the engine's log has more", "server_error")
            return error_response(fault, request.path)


@web.middleware
async def _identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get("x-request-id", "")
    is_usable = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    request[_ID] = given if is_usable else uuid.uuid4().hex
    return await handler(request)


async def _echo_id(request: web.Request, response: web.StreamResponse) -> None:
    if _ID in request:
        response.headers["X-Request-Id"] = request[_ID]


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise bad_request(f"the body cannot be read: {error}") from None


def _rank_state(view: RankView, now: float) -> dict[str, Any]:
    state: dict[str, Any] = {"rank": view.rank, "ready": view.hello is not None, "live_requests": view.num_live}
    if view.loading is not None:
        state |= view.loading.state()
    if view.hello is not None:
        state["incarnation"] = view.hello.incarnation
        state["num_blocks"] = view.hello.num_blocks
        state["max_model_len"] = view.hello.max_model_len
    if view.state is not None:
        state |= {name: getattr(view.state, name) for name in RankState.__struct_fields__ if name != "rank"}
        state["recent_prompt_tokens"] = int(view.recent_prompt_tokens.rise(now))
        state["recent_prompt_seconds"] = round(view.recent_prompt_seconds.rise(now), 3)
    return state


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
