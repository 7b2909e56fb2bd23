"""What `headrace-engine serve` was asked to do: flags, their checks, and the frozen result that every process gets.

A wrong flag is told here, before anything starts: what is wrong, where, and what to do (exit code 2).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from headrace_engine.core import Role
from headrace_engine.kv.records import PACKED_CACHES

TINY_FAMILIES = ("v4", "v41")  # that an engine can be asked to write for itself
TINY_FOLDER_FAMILIES = ("v4", "v4-0731", "v41")  # of the `tiny` command
DTYPES = ("auto", "float32", "bfloat16")
CACHE_DTYPES = (*DTYPES, *PACKED_CACHES)
FAKE_QUANTIZATIONS = ("none", "cache", "all")
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
    fake_quantization: str = "none"
    max_batch_tokens: int = 2048
    max_mixed_tokens: int = 256
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
    def leader_address(self) -> str:
        """Where this pod's ranks find the leader. On the leader's own pod that needs no name service."""
        return "127.0.0.1" if self.is_leader else self.leader_host

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
        for name, choices in _CHOICES:
            if getattr(self, name) not in choices:
                raise ConfigError(f"--{name.replace('_', '-')} must be one of {', '.join(choices)}")


_CHOICES = (("dtype", DTYPES), ("cache_dtype", CACHE_DTYPES), ("fake_quantization", FAKE_QUANTIZATIONS))

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
    ("max_mixed_tokens", 1, 1 << 20),
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
    """The flags of `headrace-engine serve`, each with its default as `EngineConfig` has it."""
    model = parser.add_argument_group("model")
    _add(model, "model", "folder with config.json, weights and tokenizer.json", metavar="DIR", default="")
    _add(model, "tiny", "instead: a small random checkpoint, such as v4:0", metavar="FAMILY:SEED")
    _add(model, "served_model_name", "default: the folder's name", metavar="NAME")
    _add(model, "dtype", "auto keeps the checkpoint's", choices=DTYPES)
    _add(model, "cache_dtype", "auto: as dtype; fp8 and fp4: packed records", choices=CACHE_DTYPES)
    _add(
        model,
        "fake_quantization",
        "roundings of the model's training: of the cache, or also of what quantized weights are multiplied with",
        choices=FAKE_QUANTIZATIONS,
    )
    group = parser.add_argument_group("group", "one engine of several ranks on several pods")
    _add(group, "role", "unified does both phases", choices=[role.value for role in Role])
    _add(group, "data", "data-parallel ranks of the group", type=int, metavar="N")
    _add(group, "data_local", "of which this pod runs M; 0: all", type=int, metavar="M", default=0)
    _add(group, "pod_index", "0 is the leader: HTTP and frontend", type=int, metavar="I")
    group.add_argument(
        "--expert-parallel", action="store_true", help="shard the experts over the ranks, else all have all"
    )
    _add(group, "leader_host", "pod 0, as the other pods reach it", metavar="HOST")
    ports = parser.add_argument_group("ports")
    _add(ports, "host", "HTTP address", metavar="ADDRESS")
    _add(ports, "port", "HTTP; 0 takes a free one", type=int, metavar="N")
    _add(ports, "rendezvous_port", "on pod 0, where ranks meet", type=int, metavar="N")
    _add(ports, "control_port", "on pod 0, from frontend to ranks", type=int, metavar="N")
    limits = parser.add_argument_group("limits", "0 chooses from the model and the machine where it says so")
    _add(limits, "max_model_len", "tokens of prompt and answer; 0: the model's", type=int, metavar="N")
    _add(limits, "block_size", "tokens of a cache block; 0: 256, or the model's next multiple", type=int, metavar="N")
    _add(limits, "num_blocks", "cache blocks of a rank; 0: what is of use and fits", type=int, metavar="N")
    _add(limits, "max_batch_tokens", "tokens of one step of a rank", type=int, metavar="N")
    _add(limits, "max_mixed_tokens", "of which prompts take so many while others generate", type=int, metavar="N")
    _add(limits, "max_sequences", "requests that a rank runs at once", type=int, metavar="N")
    _add(limits, "max_waiting", "requests that may queue for a rank", type=int, metavar="N")
    _add(
        limits,
        "lease_seconds",
        "how long decode waits for a prefill rank that has gone silent",
        type=float,
        metavar="S",
    )
    _add(limits, "request_timeout_seconds", "longest life of a request", type=float, metavar="S")
    _add(limits, "threads", "compute threads of a rank; 0: CPUs / ranks of this pod", type=int, metavar="N")
    _add(limits, "drain_seconds", "time to finish after SIGTERM", type=float, metavar="S")


def _add(group: argparse._ArgumentGroup, name: str, text: str, **options: Any) -> None:
    """One flag, whose default is that of EngineConfig's field unless given."""
    options.setdefault("default", _DEFAULTS[name])
    shown = "" if options["default"] == "" else f" (default: {options['default']})"
    group.add_argument("--" + name.replace("_", "-"), help=text + shown, **options)


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}


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
