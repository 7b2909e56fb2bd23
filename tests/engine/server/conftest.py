"""The whole engine in one process over the toy model: HTTP, frontend, sockets and the rank loop are the real ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tests.engine.server.scripted import ScriptedModel
from tests.engine.serving.toy import EOS, VOCAB, ToyModel
from tests.pd.engines import free_ports

from headrace_engine.chat.formats import V4Format
from headrace_engine.config import EngineConfig
from headrace_engine.control import ControlClient
from headrace_engine.ep.local import LocalExchange
from headrace_engine.grammars import PendingGrammars
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.kv.layout import allocate_cache
from headrace_engine.messages import Hello
from headrace_engine.models.deepseek_v4.tiny_tokenizer import write_tokenizer
from headrace_engine.rank import RankLoop
from headrace_engine.runner import Runner
from headrace_engine.sampling.grammar import GrammarCompiler
from headrace_engine.scheduler import Scheduler, SchedulerLimits
from headrace_engine.server.frontend import Frontend
from headrace_engine.server.http import Server
from headrace_engine.server.tokenize import Tokenizer

IMAGE_TOKEN_ID = 7  # of a model that has images; its text part refuses it
BLOCK = 4
NUM_BLOCKS = 64
MAX_MODEL_LEN = 64
MAX_SEQUENCES = 8


@dataclass(frozen=True)
class Sizes:
    max_model_len: int = MAX_MODEL_LEN
    num_blocks: int = NUM_BLOCKS
    max_batch_tokens: int = 64


@dataclass
class Harness:
    client: TestClient
    frontend: Frontend
    scheduler: Scheduler
    tokenizer: Tokenizer

    async def all_free(self) -> bool:
        """Whether the rank gives everything back within a second."""
        for _ in range(100):
            if self.scheduler.is_empty and self.scheduler.pool.num_free_blocks == self.scheduler.pool.num_blocks:
                return True
            await asyncio.sleep(0.01)
        return False


class _Rank(threading.Thread):
    def __init__(
        self, control_port: int, scheduler: Scheduler, model: ToyModel, sizes: Sizes, tokenizer_file: Path
    ) -> None:
        super().__init__(daemon=True)
        self._compiler = GrammarCompiler(tokenizer_file, VOCAB, (EOS,))
        self._model = model
        self._sizes = sizes
        self._control_port = control_port
        self.scheduler = scheduler

    def run(self) -> None:
        sizes = self._sizes
        num_slots = 2 * MAX_SEQUENCES
        cache = allocate_cache(self._model.cache_groups, BLOCK, sizes.num_blocks, num_slots)
        runner = Runner(
            self._model,
            cache,
            LocalExchange(),
            max_batch_tokens=sizes.max_batch_tokens,
            max_sequences=MAX_SEQUENCES,
            max_blocks=sizes.max_model_len // BLOCK,
            num_slots=num_slots,
        )
        control = ControlClient("127.0.0.1", self._control_port, 0)
        control.send(Hello(0, "incarnation", "fingerprint", sizes.max_model_len, sizes.num_blocks))
        grammars = PendingGrammars(self._compiler, control.wake)
        try:
            RankLoop(0, control, self.scheduler, runner, None, None, grammars).run()
        finally:
            grammars.close()
            control.close()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 4096)
    return Tokenizer(folder)


@pytest.fixture
def max_waiting() -> int:
    return 100


@pytest.fixture
def step_seconds() -> float:
    """How long a forward of the toy takes at least."""
    return 0.0


@pytest.fixture
def timeout_seconds() -> float:
    return 20.0


@pytest.fixture
def scripts() -> list[str]:
    """What the model says, turn by turn, where a test cares (`ScriptedModel`)."""
    return []


@pytest.fixture
def model(tokenizer: Tokenizer, scripts: list[str], step_seconds: float) -> ToyModel:
    return ScriptedModel(BLOCK, tokenizer, scripts, step_seconds) if scripts else ToyModel(BLOCK, step_seconds)


@pytest.fixture
def sizes(scripts: list[str]) -> Sizes:
    """Of the rank: prompts of chats with tools are long."""
    return Sizes(max_model_len=4096, num_blocks=2048, max_batch_tokens=4096) if scripts else Sizes()


@pytest.fixture
async def engine(
    tokenizer: Tokenizer, model: ToyModel, sizes: Sizes, max_waiting: int, timeout_seconds: float
) -> AsyncIterator[Harness]:
    (control_port,) = free_ports(1)
    config = EngineConfig(
        model="x", served_model_name="toy", control_port=control_port, request_timeout_seconds=timeout_seconds
    )
    failures: list[str] = []
    frontend = Frontend(config, failures.append)
    frontend.start()
    num_tokens = sizes.max_batch_tokens
    limits = SchedulerLimits(num_tokens, num_tokens, MAX_SEQUENCES, max_waiting, sizes.max_model_len, frozenset({EOS}))
    scheduler = Scheduler(limits, BlockPool(sizes.num_blocks, 2 * MAX_SEQUENCES, BLOCK), has_snapshots=True)
    rank = _Rank(control_port, scheduler, model, sizes, tokenizer.file)
    rank.start()
    chat_format = V4Format(thinks_by_default=tokenizer.thinks_by_default)
    server = Server(
        config, frontend, tokenizer, vocab_size=VOCAB, chat_format=chat_format, image_token_id=IMAGE_TOKEN_ID
    )
    app = server.app()
    client = TestClient(TestServer(app, handler_cancellation=True))
    await client.start_server()
    async with asyncio.timeout(20):
        await frontend.all_ready.wait()
    yield Harness(client, frontend, scheduler, tokenizer)
    await client.close()
    frontend.shut_down_ranks()
    await asyncio.to_thread(rank.join, 10)
    assert not rank.is_alive()
    await frontend.close()
    assert failures == []


@pytest.fixture
async def client(engine: Harness) -> AsyncIterator[AsyncOpenAI]:
    url = str(engine.client.make_url("/v1"))
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def anthropic_client(engine: Harness) -> AsyncIterator[AsyncAnthropic]:
    url = str(engine.client.make_url("/"))
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client
