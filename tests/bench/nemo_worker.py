"""NeMo AutoModel's DeepSeek-V4.1 at work; runs in its own environment, see tests/reference/nemo.py and nemo_peer.py.

usage: python -m tests.bench.nemo_worker FOLDER DTYPE NUM_THREADS CONNECTION
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tests.reference import nemo_model


@torch.inference_mode()
def forward_seconds(model: torch.nn.Module, batch: int, num_tokens: int) -> float:
    """Of one forward of `batch` random sequences, with the logits of their last tokens only, as for a next token."""
    tokens = torch.randint(10, 250, (batch, num_tokens))
    began = time.perf_counter()
    model(tokens, logits_to_keep=1)
    return time.perf_counter() - began


@torch.inference_mode()
def logits(model: torch.nn.Module, tokens: list[int]) -> bytes:
    """fp32 [tokens, vocab], row by row. As bytes: the asker's libraries may be of other versions."""
    found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return bytes(found.float().contiguous().numpy().tobytes())


def main(folder: Path, dtype: str, num_threads: int, connection: Connection) -> None:
    nemo_model.prepare(num_threads)
    nemo_model.keep_cache_unrounded()
    # All experts in one grouped product are faster than one after the other.
    model = nemo_model.load_v41(folder, dtype, experts="torch_mm")
    connection.send({name: importlib.metadata.version(name) for name in ("nemo-automodel", "torch")})
    answers: dict[str, Any] = {"forward_seconds": forward_seconds, "logits": logits}
    while True:
        try:
            question, *arguments = connection.recv()
        except EOFError:  # nobody is left who could ask
            return
        connection.send(answers[question](model, *arguments))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Connection(int(sys.argv[4])))
