"""How fast a checkpoint in the published formats loads on two ranks, beside reading its files.

Writes a synthetic DeepSeek-V4 (FP8, FP4 experts, shards), drops it from the page cache, reads the files once plainly,
drops them again, and has two processes load a rank each, with the experts shared; then they load it from the page
cache. Each counts what it read by tensors, and what came from the disk as the kernel counts it. Values are random
bytes: only their number matters.

Run `python -m tests.bench.loading` from the root of the repository, or `make bench-load`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.bench.report import Cell, Results, machine, table

from headrace_engine.models.deepseek_v4.config import parse
from headrace_engine.models.deepseek_v4.names import FP8_BLOCK, expected_shapes, published_storage
from headrace_engine.models.deepseek_v4.tiny import PUBLISHED, TINY_CONFIG
from headrace_engine.models.headers import read_headers, shard_files
from headrace_engine.models.quantize import FP4_ROW
from headrace_engine.models.shards import Storage, Tensor, write_shards
from headrace_engine.pod import rank_environment

RANKS = 2
LOAD_LIMIT_SECONDS = 900
SHARD_BYTES = 512 << 20
READ_BYTES = 8 << 20  # of one read() when the files are read plainly
NAMES = ("read the files", "load, cold", "load, cached")
SECONDS = Cell("time", "s", higher_is_better=False)
CPU = Cell("processor time, all ranks", "s", higher_is_better=False)
SPEED = Cell("checkpoint", "GB/s", higher_is_better=True)
FROM_DISK = Cell("from disk / checkpoint", "", higher_is_better=False)
BY_TENSORS = Cell("read by tensors / checkpoint", "", higher_is_better=False)
RATIO = Cell("time / reading the files", "", higher_is_better=False)

_CONFIG = {
    **TINY_CONFIG,
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 512,
    "o_lora_rank": 256,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1024,
}


def make_config(num_layers: int) -> dict[str, Any]:
    """Layers repeat the tiny model's pattern; the first three route by token id."""
    kinds = TINY_CONFIG["layer_types"]
    return {
        **_CONFIG,
        "num_hidden_layers": num_layers,
        "layer_types": [kinds[layer % len(kinds)] for layer in range(num_layers)],
        "mlp_layer_types": ["hash_moe" if layer < 3 else "moe" for layer in range(num_layers)],
    }


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 1) -> None:
    """A checkpoint folder without a tokenizer: enough to load, not to serve."""
    random = np.random.default_rng(seed)
    shapes = expected_shapes(parse(config))
    parts = (part for name, shape in shapes.items() for part in _random_tensor(random, name, shape, config))
    write_shards(folder, parts, SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps({**config, **PUBLISHED.config}))


def _random_tensor(
    random: np.random.Generator, name: str, shape: tuple[int, ...], config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """A tensor and its scales as stored: random bytes that are finite numbers in their format."""
    scale_name = name.removesuffix(".weight") + ".scale"
    match published_storage(name):
        case Storage.FP4:
            yield name, Tensor(random.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8), "I8")
            yield scale_name, Tensor(_scales(random, (shape[0], shape[1] // FP4_ROW)), "F8_E8M0")
        case Storage.FP8:
            yield name, Tensor(random.integers(0, 0x78, shape, dtype=np.uint8), "F8_E4M3")
            blocks = (-(-shape[0] // FP8_BLOCK[0]), -(-shape[1] // FP8_BLOCK[1]))
            yield scale_name, Tensor(_scales(random, blocks), "F8_E8M0")
        case Storage.BF16:
            yield name, Tensor(random.integers(0x3C00, 0x3D00, shape, dtype=np.uint16), "BF16")
        case Storage.F32:
            yield name, Tensor(random.random(shape, dtype=np.float32), "F32")
        case Storage.I64:
            yield name, Tensor(random.integers(0, config["n_routed_experts"], shape), "I64")


def _scales(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return random.integers(115, 125, shape, dtype=np.uint8)


@dataclass(frozen=True)
class Loaded:
    """What loading one rank took, or all of them together."""

    seconds: float
    cpu_seconds: float
    disk_bytes: int
    tensor_bytes: int


def drop_from_cache(files: list[Path]) -> None:
    """Have the kernel forget the files' pages, so that the next read comes from the disk."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(files: list[Path], num_bytes: int) -> Loaded:
    """As many threads as there are ranks read every byte once."""

    def read(mine: list[Path]) -> None:
        buffer = bytearray(READ_BYTES)
        for file in mine:
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass

    threads = [threading.Thread(target=read, args=(files[rank::RANKS],)) for rank in range(RANKS)]
    started, cpu_started = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Loaded(time.perf_counter() - started, time.process_time() - cpu_started, num_bytes, num_bytes)


def load_ranks(folder: Path, forgotten: list[Path]) -> Loaded:
    """Start a process for each rank, have all load at the same time, and end them.

    forgotten: files that are dropped from the page cache when all are about to begin, as they are before a plain read.
    Were they dropped earlier, a virtual machine might have given that memory back to its host while the ranks start,
    and getting it again takes longer than reading.
    """
    argv = [sys.executable, "-m", "tests.bench.loading", "--rank"]
    environment = rank_environment(os.environ, max(1, (os.cpu_count() or 1) // RANKS))
    ranks = [
        subprocess.Popen(
            [*argv, str(rank), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(RANKS)
    ]
    timer = threading.Timer(LOAD_LIMIT_SECONDS, lambda: [rank.kill() for rank in ranks])
    timer.start()
    try:
        for rank in ranks:  # imports are done when a rank has said its first word
            assert rank.stdout is not None
            rank.stdout.readline()
        drop_from_cache(forgotten)
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        loaded = [Loaded(**json.loads(rank.communicate()[0])) for rank in ranks]
    finally:
        timer.cancel()
        for rank in ranks:
            rank.kill()
            rank.wait()
    return Loaded(
        seconds=max(rank.seconds for rank in loaded),
        cpu_seconds=sum(rank.cpu_seconds for rank in loaded),
        disk_bytes=sum(rank.disk_bytes for rank in loaded),
        tensor_bytes=sum(rank.tensor_bytes for rank in loaded),
    )


def load_one(rank: int, folder: Path) -> Loaded:
    """The body of a rank's process: ready, wait for the word, load."""
    import torch

    from headrace_engine import kernels, models
    from headrace_engine.models.progress import LoadProgress

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kernels.prepare(torch.zeros(16, 16, dtype=torch.bfloat16))  # loads the kernels
    print("ready", flush=True)
    sys.stdin.readline()
    read = [0]
    progress = LoadProgress(lambda done, _: read.__setitem__(0, done))
    before, started, cpu_started = _disk_bytes(), time.perf_counter(), time.process_time()
    models.load(folder, rank=rank, num_ranks=RANKS, expert_parallel=True, progress=progress)
    return Loaded(
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
        disk_bytes=_disk_bytes() - before,
        tensor_bytes=read[0],
    )


def _disk_bytes() -> int:
    """Bytes that this process has caused to be read from a disk so far."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes:"))
    return int(line.split()[1])


def measure(folder: Path, repetitions: int) -> Results:
    files = shard_files(folder)
    num_bytes = sum(tensor.num_bytes for tensor in read_headers(files).values())
    results = Results()
    for _ in range(repetitions):
        drop_from_cache(files)
        plain = read_plainly(files, num_bytes)
        for name, loaded in (
            (NAMES[0], plain),
            (NAMES[1], load_ranks(folder, forgotten=files)),
            (NAMES[2], load_ranks(folder, forgotten=[])),
        ):
            results.add(SECONDS, name, loaded.seconds)
            results.add(CPU, name, loaded.cpu_seconds)
            results.add(SPEED, name, num_bytes / loaded.seconds / 1e9)
            results.add(RATIO, name, loaded.seconds / plain.seconds)
            results.add(FROM_DISK, name, loaded.disk_bytes / num_bytes)
            results.add(BY_TENSORS, name, loaded.tensor_bytes / num_bytes)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint, to the next layer")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where it is written, and removed again; default: $TMPDIR")
    parser.add_argument("--output", type=Path, default=Path("bench-results/load.json"))
    parser.add_argument("--rank", nargs=2, metavar=("RANK", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(json.dumps(load_one(int(arguments.rank[0]), Path(arguments.rank[1])).__dict__))
        return
    with tempfile.TemporaryDirectory(prefix="headrace-bench-load-", dir=arguments.folder) as directory:
        folder = Path(directory)
        write_checkpoint(folder, make_config(num_layers(arguments.gigabytes * 1e9)))
        results = measure(folder, arguments.repetitions)
    print(table(results, NAMES, None))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    found = {f"{cell}: {name}": values for (cell, name), values in results.values.items()}
    arguments.output.write_text(json.dumps({"machine": machine(), "results": found}, indent=1) + "\n")


def num_layers(num_bytes: float) -> int:
    """Layers of a checkpoint of about so many bytes; at least one of each kind."""
    experts = _CONFIG["n_routed_experts"] * 3 * _CONFIG["hidden_size"] * _CONFIG["moe_intermediate_size"]
    return max(4, round(num_bytes / (experts * (0.5 + 1 / FP4_ROW))))


if __name__ == "__main__":
    main()
