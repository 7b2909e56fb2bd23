"""`python -m headrace_engine.rank_main CONFIG_JSON RANK STATUS_FD PARENT_PID`: start one rank, run its loop, end.

Started by the pod's main process only (`pod.py`), which learns through STATUS_FD when the rank is ready. The rank dies
with that process, whatever happens to it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from headrace_engine import models
from headrace_engine.config import ConfigError, EngineConfig
from headrace_engine.control import ControlClient
from headrace_engine.core import Region, Role
from headrace_engine.ep.alltoall import AllToAllExchange
from headrace_engine.ep.exchange import Exchange
from headrace_engine.ep.local import LocalExchange
from headrace_engine.grammars import PendingGrammars
from headrace_engine.group import StepGroup, join
from headrace_engine.kv import layout
from headrace_engine.kv.blocks import BlockPool
from headrace_engine.kv.ticket import CacheRegion
from headrace_engine.kv.transfer import TransferAgent
from headrace_engine.messages import Hello, Welcome
from headrace_engine.models.progress import LoadProgress, Report
from headrace_engine.models.protocol import ForwardBatch, Model
from headrace_engine.plan import CachePlan, available_memory_bytes, choose_block_size, plan_cache
from headrace_engine.rank import RankLoop
from headrace_engine.runner import Runner
from headrace_engine.sampling.grammar import GrammarCompiler
from headrace_engine.scheduler import Scheduler, SchedulerLimits
from headrace_engine.server.loading import Loading
from headrace_engine.transfers import Transfers

WELCOME_SECONDS = 600.0
EXIT_BAD_INPUT = 2
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    rank, status_fd = int(sys.argv[2]), int(sys.argv[3])
    _die_with_parent()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s"
    )
    # The pod's main process decides when a rank ends; signals to the whole process group (Ctrl-C) are for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _run(config, rank, status_fd)
    except (ConfigError, models.ModelError) as error:
        log.error("%s", error)
        return EXIT_BAD_INPUT
    except Exception:
        log.exception("rank %d ends", rank)
        return 1
    return 0


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, so that no rank is ever left alone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[4]):
        sys.exit(1)  # it ended before the kernel was asked


def _run(config: EngineConfig, rank: int, status_fd: int) -> None:
    started = time.monotonic()
    torch.set_num_threads(config.num_threads)
    model = models.load(
        config.model,
        rank=rank,
        num_ranks=config.data,
        expert_parallel=config.has_collectives,
        dtype=config.dtype,
        cache_dtype=config.cache_dtype,
        fake_quantization=config.fake_quantization,
        progress=LoadProgress(_progress_report(status_fd)),
    )
    plan = _plan(config, model)
    log.info("weights loaded in %.1f s; %s", time.monotonic() - started, plan.describe())
    cache = layout.allocate_cache(model.cache_groups, plan.block_size, plan.num_blocks, plan.num_slots)
    group, exchange = _join(config, model, rank)
    runner = Runner(
        model,
        cache,
        exchange,
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        max_blocks=-(-plan.max_model_len // plan.block_size),
        num_slots=plan.num_slots,
    )
    _warm_up(model, cache, exchange)
    control = ControlClient(config.leader_address, config.control_port, rank)
    scheduler = _scheduler(config, model, plan)
    incarnation = str(uuid.uuid4())
    fingerprint = layout.fingerprint(model.cache_groups, plan.block_size, model.digest)
    transfers: Transfers | None = None
    if config.role is not Role.UNIFIED:
        regions = _regions(model, cache)
        agent = _start_agent(config, rank, incarnation, fingerprint, plan.block_size, regions, control.wake)
        transfers = Transfers(agent, scheduler)
    hello = Hello(rank, incarnation, fingerprint, plan.max_model_len, plan.num_blocks)
    _say_hello(control, hello)
    os.write(status_fd, b"ready\n")
    log.info("ready after %.1f s", time.monotonic() - started)
    compiler = GrammarCompiler(Path(config.model) / "tokenizer.json", model.vocab_size, model.eos_token_ids)
    grammars = PendingGrammars(compiler, control.wake)
    try:
        RankLoop(rank, control, scheduler, runner, transfers, group, grammars).run()
    finally:
        grammars.close()
        if transfers is not None:
            transfers.close()
        control.close()
    if group is not None:
        group.close()


def _progress_report(status_fd: int) -> Report:
    """Tells the pod, and the log at every tenth of the bytes."""
    logged_tenths = 0

    def report(num_loaded: int, num_bytes: int) -> None:
        nonlocal logged_tenths
        os.write(status_fd, Loading(num_loaded, num_bytes).to_line())
        tenths = 10 * num_loaded // max(1, num_bytes)
        if tenths > logged_tenths:
            logged_tenths = tenths
            log.info("read %d %% of %.2f GB of weights", 10 * tenths, num_bytes / 1e9)

    return report


def _plan(config: EngineConfig, model: Model) -> CachePlan:
    block_size = choose_block_size(config, model.block_multiple)
    return plan_cache(
        config,
        max_position=model.max_position,
        block_multiple=model.block_multiple,
        block_bytes=layout.block_bytes(model.cache_groups, block_size),
        slot_bytes=layout.slot_bytes(model.cache_groups),
        available_bytes=available_memory_bytes(),
    )


def _join(config: EngineConfig, model: Model, rank: int) -> tuple[StepGroup | None, Exchange]:
    if not config.has_collectives:
        return None, LocalExchange()
    group = join(config.leader_address, config.rendezvous_port, rank, config.data)
    num_experts = models.describe_config(config.model).num_experts
    return group, AllToAllExchange(group.process_group, num_experts)


def _scheduler(config: EngineConfig, model: Model, plan: CachePlan) -> Scheduler:
    has_snapshots = config.role is not Role.DECODE  # its state comes by push
    pool = BlockPool(plan.num_blocks, plan.num_slots, plan.block_size, needs_snapshots=has_snapshots)
    limits = SchedulerLimits(
        max_batch_tokens=config.max_batch_tokens,
        max_mixed_tokens=config.max_mixed_tokens,
        max_sequences=config.max_sequences,
        max_waiting=config.max_waiting,
        max_model_len=plan.max_model_len,
        eos_token_ids=frozenset(model.eos_token_ids),
    )
    return Scheduler(limits, pool, has_snapshots=has_snapshots)


def _regions(model: Model, cache: dict[str, torch.Tensor]) -> list[CacheRegion]:
    regions = []
    for group in model.cache_groups:
        tensor = cache[group.name]
        item_bytes = tensor[0].numel() * tensor.element_size()
        region = Region(group.name, tensor.data_ptr(), item_bytes, tensor.shape[0])
        regions.append(CacheRegion(region, group.kind))
    return regions


def _start_agent(
    config: EngineConfig,
    rank: int,
    incarnation: str,
    fingerprint: str,
    block_size: int,
    regions: list[CacheRegion],
    wake: Callable[[], None],
) -> TransferAgent:
    return TransferAgent(
        f"{os.environ.get('HEADRACE_POD_NAME', config.role.value)}/{rank}",
        incarnation,
        regions,
        block_size=block_size,
        fingerprint=fingerprint,
        lease_seconds=config.lease_seconds,
        wake=wake,
    )


def _warm_up(model: Model, cache: dict[str, torch.Tensor], exchange: Exchange) -> None:
    """Run small batches of both shapes once, so that no request pays for compiling or first allocations.

    Writes block 0 and slot 0, which nobody owns yet. A collective in expert-parallel groups: same shapes on all ranks.
    """
    for num_tokens in (4, 1):
        ids = torch.arange(num_tokens)
        batch = ForwardBatch(
            token_ids=ids % model.vocab_size,
            positions=ids,
            query_starts=torch.tensor([0, num_tokens]),
            context_lens=torch.tensor([num_tokens]),
            block_tables=torch.zeros((1, 1), dtype=torch.int32),
            state_slots=torch.tensor([0]),
            logit_rows=torch.tensor([num_tokens - 1]),
            query_lens=(num_tokens,),
            max_context_len=num_tokens,
            previous_ids=torch.full((1, model.num_previous_tokens), -1),
        )
        with torch.inference_mode():
            model.forward(batch, cache, exchange)


def _say_hello(control: ControlClient, hello: Hello) -> None:
    """Introduce this rank until the frontend answers; it may start later than we do."""
    control.send(hello)
    deadline = time.monotonic() + WELCOME_SECONDS
    while time.monotonic() < deadline:
        control.wait(1.0)
        if any(isinstance(message, Welcome) for message in control.receive(check_silence=False)):
            return
    raise TimeoutError(f"the group's leader did not answer within {WELCOME_SECONDS:g} s")


if __name__ == "__main__":
    # Skip interpreter teardown: library threads (collectives, transfers) must not turn a clean end into a crash.
    code = main()
    logging.shutdown()
    os._exit(code)
