"""One rank of the all-to-all tests; started as a process of its own by test_exchange.py.

usage: exchange_worker.py RANK NUM_RANKS FOLDER, where FOLDER has the checkpoint, takes the rendezvous file and gets
`rank-RANK.pt`, the logits of this rank's steps.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.engine.model.harness import PagedRun, random_tokens

from headrace_engine import models
from headrace_engine.ep.alltoall import AllToAllExchange

# Tokens that each rank runs in each step: uneven, idle on one side, on the other, on both, single tokens.
SCHEDULE = [(17, 0), (0, 5), (1, 9), (1, 1), (0, 0), (30, 2), (1, 0)]


def rank_tokens(rank: int) -> list[int]:
    return random_tokens(sum(step[rank] for step in SCHEDULE), seed=50 + rank)


def main(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=datetime.timedelta(seconds=60)
    )
    model = models.load(folder / "model", rank=rank, num_ranks=num_ranks, expert_parallel=True)
    run = PagedRun(model, exchange=AllToAllExchange(dist.group.WORLD, model.num_experts), seed=rank)
    tokens, outputs = rank_tokens(rank), []
    sequence = run.sequence(len(tokens))
    for step in SCHEDULE:
        part = tokens[sequence.length : sequence.length + step[rank]]
        outputs += run.step([(sequence, part)] if part else [])
    torch.save(torch.cat(outputs), folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
