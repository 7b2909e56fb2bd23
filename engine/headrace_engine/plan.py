"""From flags, model and machine to the sizes of one rank's cache. Pure but for `available_memory_bytes`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace_engine.config import PREFERRED_BLOCK_SIZE, ConfigError, EngineConfig
from headrace_engine.core import Role

CACHE_SHARE = 0.3  # of the memory that is available when the rank starts, over all ranks of the pod


@dataclass(frozen=True)
class CachePlan:
    block_size: int  # tokens
    num_blocks: int
    num_slots: int
    max_model_len: int  # tokens
    num_bytes: int

    def describe(self) -> str:
        tokens = self.num_blocks * self.block_size
        return (
            f"cache: {self.num_blocks} blocks of {self.block_size} tokens = {tokens:,} tokens, {self.num_slots} state "
            f"slots, {self.num_bytes / 2**20:,.1f} MiB; requests of up to {self.max_model_len:,} tokens"
        )


def choose_block_size(config: EngineConfig, block_multiple: int) -> int:
    """The flag, or the multiple of the model's ratios that is nearest above 256. Raises ConfigError."""
    if not config.block_size:
        return -(-PREFERRED_BLOCK_SIZE // block_multiple) * block_multiple
    if config.block_size % block_multiple:
        raise ConfigError(f"--block-size {config.block_size}: this model needs a multiple of {block_multiple}")
    return config.block_size


def choose_max_model_len(config: EngineConfig, max_position: int) -> int:
    """The flag, or all that the model can. Raises ConfigError."""
    if config.max_model_len > max_position:
        raise ConfigError(f"--max-model-len {config.max_model_len}: this model ends at {max_position} tokens")
    return config.max_model_len or max_position


def check_lengths(config: EngineConfig, max_position: int, block_multiple: int) -> None:
    """What can be told of the flags before weights are loaded. Raises ConfigError."""
    block_size = choose_block_size(config, block_multiple)
    max_model_len = choose_max_model_len(config, max_position)
    if config.num_blocks and config.num_blocks * block_size < max_model_len:
        raise _too_few_blocks(config.num_blocks, block_size, max_model_len)


def plan_cache(
    config: EngineConfig,
    *,
    max_position: int,
    block_multiple: int,
    block_bytes: int,
    slot_bytes: int,
    available_bytes: int,
) -> CachePlan:
    """Sizes of one rank's cache; `block_bytes` is for the block size of `choose_block_size`.

    Blocks are as many as `max_sequences` of full length could use, or what fits the memory budget. Raises ConfigError
    if a single request of full length does not fit.
    """
    block_size = choose_block_size(config, block_multiple)
    max_model_len = choose_max_model_len(config, max_position)
    # Prefixes are kept with a copy of the state, in slots of their own. A decode engine receives its state by push.
    num_slots = config.max_sequences * (1 if config.role is Role.DECODE else 2)
    blocks_of_longest = -(-max_model_len // block_size)
    num_blocks = config.num_blocks
    if not num_blocks:
        budget = int(available_bytes * CACHE_SHARE) // config.data_local - num_slots * slot_bytes
        num_blocks = min(config.max_sequences * blocks_of_longest, max(0, budget // max(1, block_bytes)))
    if num_blocks < blocks_of_longest:
        raise _too_few_blocks(num_blocks, block_size, max_model_len)
    num_bytes = num_blocks * block_bytes + num_slots * slot_bytes
    return CachePlan(block_size, num_blocks, num_slots, max_model_len, num_bytes)


def _too_few_blocks(num_blocks: int, block_size: int, max_model_len: int) -> ConfigError:
    return ConfigError(
        f"{num_blocks} cache blocks of {block_size} tokens hold no request of --max-model-len {max_model_len} "
        f"({-(-max_model_len // block_size)} blocks): lower --max-model-len or --max-sequences, raise --num-blocks, or "
        "give the pod more memory"
    )


def available_memory_bytes() -> int:
    """Memory that this pod may still take: the machine's, or what its cgroup leaves."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, max(0, limit - used))
    except (OSError, ValueError):
        pass  # no cgroup v2, or no limit ("max")
    return available
