"""What `headrace-engine serve` was asked to do: flags, their checks, and the frozen result that every process gets.

A wrong flag is told here, before anything starts: what is wrong, where, and what to do (exit code 2).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from headrace_engine.core import Role

TINY_FAMILIES = ("v4",)
DTYPES = ("auto", "float32", "bfloat16")
PREFERRED_BLOCK_SIZE = 256  # tokens


class ConfigError(ValueError):
    """A flag, or a combination of flags, that cannot work. The message says what to do."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One pod's configuration. Numbers that are 0 here are chosen from the model and the machine (see `plan`)."""

    model: str  # folder of the checkpoint; empty with `tiny`
    tiny: str = ""  # FAMILY:SEED
    served_model_name: str = ""
    role: Role = Role.UNIFIED
    data: int = 1
    data_local: int = 1
    pod_index: int = 0
    expert_parallel: bool = False
    leader_host: str = "127.0.0.1"
    host: str = "0.0.0.0"
    port: int = 8000
    rendezvous_port: int = 29500
    control_port: int = 29501
    max_model_len: int = 0
    block_size: int = 0
    dtype: str = "auto"
    cache_dtype: str = "auto"
    max_batch_tokens: int = 2048
    max_sequences: int = 64
    max_waiting: int = 512
    num_blocks: int = 0
    lease_seconds: float = 30.0
    request_timeout_seconds: float = 3600.0
    threads: int = 0
    drain_seconds: float = 600.0

    @property
    def num_pods(self) -> int:
        return self.data // self.data_local

    @property
    def is_leader(self) -> bool:
        return self.pod_index == 0

    @property
    def local_ranks(self) -> range:
        """Ranks of the group that run on this pod."""
        return range(self.pod_index * self.data_local, (self.pod_index + 1) * self.data_local)

    @property
    def has_collectives(self) -> bool:
        """Whether the ranks of the group step together (experts are sharded over them)."""
        return self.expert_parallel and self.data > 1

    @property
    def num_threads(self) -> int:
        """Compute threads of one rank."""
        return self.threads or max(1, (_num_cpus()) // self.data_local)

    def check(self) -> None:
        """Raise ConfigError on the first thing that cannot work."""
        self._check_numbers()
        if bool(self.model) == bool(self.tiny):
            raise ConfigError("give either --model DIR or --tiny FAMILY:SEED")
        if self.tiny:
            parse_tiny(self.tiny)
        elif not Path(self.model).is_dir():
            raise ConfigError(f"--model {self.model}: there is no such folder")
        if self.data % self.data_local:
            raise ConfigError(
                f"--data {self.data} ranks cannot be spread evenly over pods of --data-local {self.data_local}; "
                "make --data a multiple of --data-local"
            )
        if self.pod_index >= self.num_pods:
            raise ConfigError(
                f"--pod-index {self.pod_index}: --data {self.data} with --data-local {self.data_local} has pods "
                f"0 to {self.num_pods - 1}"
            )
        if self.num_pods > 1 and not self.leader_host:
            raise ConfigError("--leader-host is needed in a group of several pods")
        ports = {"--port": self.port, "--rendezvous-port": self.rendezvous_port, "--control-port": self.control_port}
        taken = [port for port in ports.values() if port]
        if len(set(taken)) != len(taken):
            raise ConfigError("--port, --rendezvous-port and --control-port must differ")

    def _check_numbers(self) -> None:
        for name, minimum, maximum in _BOUNDS:
            value = getattr(self, name)
            if not minimum <= value <= maximum:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} {value:g}: must be between {minimum:g} and {maximum:g}")
        for name in ("dtype", "cache_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ConfigError(f"--{name.replace('_', '-')} must be one of {', '.join(DTYPES)}")


_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("data", 1, 4096),
    ("data_local", 1, 4096),
    ("pod_index", 0, 4095),
    ("port", 0, 65535),
    ("rendezvous_port", 1, 65535),
    ("control_port", 1, 65535),
    ("max_model_len", 0, 1 << 24),
    ("block_size", 0, 1 << 16),
    ("max_batch_tokens", 1, 1 << 20),
    ("max_sequences", 1, 1 << 16),
    ("max_waiting", 1, 1 << 20),
    ("num_blocks", 0, 1 << 22),
    ("lease_seconds", 0.1, 3600),
    ("request_timeout_seconds", 1, 86400),
    ("threads", 0, 1024),
    ("drain_seconds", 0, 86400),
)


def parse_tiny(value: str) -> tuple[str, int]:
    """Family and seed of `--tiny FAMILY:SEED`. Raises ConfigError."""
    family, _, seed = value.partition(":")
    if family not in TINY_FAMILIES or not seed.isdecimal():
        raise ConfigError(f"--tiny {value}: expected FAMILY:SEED, such as v4:0 (families: {', '.join(TINY_FAMILIES)})")
    return family, int(seed)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `headrace-engine serve`; every default is shown by --help."""
    add = parser.add_argument
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="", metavar="DIR", help="folder with config.json, weights and tokenizer.json")
    model.add_argument(
        "--tiny",
        default="",
        metavar="FAMILY:SEED",
        help="instead of --model: a small random checkpoint, e.g. v4:0, the same bytes each time",
    )
    model.add_argument("--served-model-name", default="", metavar="NAME", help="default: the folder's name")
    model.add_argument("--dtype", default="auto", choices=DTYPES, help="auto keeps the checkpoint's (default: auto)")
    model.add_argument("--cache-dtype", default="auto", choices=DTYPES, help="auto: as the weights (default: auto)")
    group = parser.add_argument_group("group", "one engine of several ranks on several pods")
    add = group.add_argument
    add("--role", default="unified", choices=[role.value for role in Role], help="default: unified, no P/D")
    add("--data", type=int, default=1, metavar="N", help="data-parallel ranks of the group (default: 1)")
    add("--data-local", type=int, default=0, metavar="M", help="of which this pod runs M (default: all)")
    add("--pod-index", type=int, default=0, metavar="I", help="0 is the leader: HTTP and frontend (default: 0)")
    add("--expert-parallel", action="store_true", help="shard the experts over the ranks; else every rank has all")
    add("--leader-host", default="127.0.0.1", metavar="HOST", help="pod 0 as other pods reach it (default: 127.0.0.1)")
    ports = parser.add_argument_group("ports")
    ports.add_argument("--host", default="0.0.0.0", help="HTTP address (default: 0.0.0.0)")
    ports.add_argument("--port", type=int, default=8000, help="HTTP; 0 takes a free one (default: 8000)")
    ports.add_argument("--rendezvous-port", type=int, default=29500, help="torch store on pod 0 (default: 29500)")
    ports.add_argument("--control-port", type=int, default=29501, help="frontend on pod 0, for ranks (default: 29501)")
    _add_limit_arguments(parser.add_argument_group("limits"))


def _add_limit_arguments(limits: argparse._ArgumentGroup) -> None:
    add = limits.add_argument
    add("--max-model-len", type=int, default=0, metavar="N", help="prompt and answer, tokens (default: the model's)")
    add("--block-size", type=int, default=0, metavar="N", help="tokens of a cache block (default: 256, or the model's)")
    add(
        "--num-blocks",
        type=int,
        default=0,
        metavar="N",
        help="cache blocks of a rank (default: what is of use and fits)",
    )
    add("--max-batch-tokens", type=int, default=2048, metavar="N", help="tokens of one step of a rank (default: 2048)")
    add("--max-sequences", type=int, default=64, metavar="N", help="requests that a rank runs at once (default: 64)")
    add("--max-waiting", type=int, default=512, metavar="N", help="requests that may queue for a rank (default: 512)")
    add(
        "--lease-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="life of a ticket: writes start before (default: 30)",
    )
    add(
        "--request-timeout-seconds",
        type=float,
        default=3600.0,
        metavar="S",
        help="longest life of a request (default: 3600)",
    )
    add("--threads", type=int, default=0, metavar="N", help="compute threads of a rank (default: CPUs / local ranks)")
    add("--drain-seconds", type=float, default=600.0, metavar="S", help="time to finish after SIGTERM (default: 600)")


def config_from(arguments: argparse.Namespace) -> EngineConfig:
    """The checked configuration. Raises ConfigError."""
    values = {name: getattr(arguments, name) for name in EngineConfig.__struct_fields__}
    values["role"] = Role(values["role"])
    values["data_local"] = values["data_local"] or max(1, values["data"])
    name = values["tiny"].replace(":", "-") if values["tiny"] else Path(values["model"]).resolve().name
    values["served_model_name"] = values["served_model_name"] or (f"tiny-{name}" if values["tiny"] else name)
    config = EngineConfig(**values)
    config.check()
    return config


def _num_cpus() -> int:
    """CPUs that this process may use: its affinity, capped by the cgroup's quota."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cpus  # no cgroup v2, or no quota ("max")
