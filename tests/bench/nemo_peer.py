"""The peer of our DeepSeek-V4.1: NeMo AutoModel's, eager, in a process of its own environment.

It is made for training: it has no cache, so that its next token costs a forward of the whole sequence.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tests.bench.worker import Worker
from tests.reference import nemo

START_LIMIT_SECONDS = 180.0  # its imports alone take 10 s
FORWARD_LIMIT_SECONDS = 600.0
HOW_TO_INSTALL = (
    f"NeMo AutoModel {nemo.VERSION} is not installed, so that V4.1 has no peer: "
    "`make bench-steps-peer` installs it (5 GB) and measures it, too"
)


class NemoModel:
    """A checkpoint folder's DeepSeek-V4.1. Raises WorkerError where the process ends or does not answer."""

    def __init__(self, folder: Path, dtype: str, num_threads: int) -> None:
        command = [str(nemo.python()), "-m", "tests.bench.nemo_worker", str(folder), dtype, str(num_threads)]
        self._worker = Worker(f"NeMo AutoModel, {dtype}", command)
        try:
            self.versions: dict[str, str] = self._worker.receive(START_LIMIT_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> NemoModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._worker.close()

    def forward_seconds(self, batch: int, num_tokens: int) -> float:
        """Of a forward of `batch` sequences of `num_tokens` random tokens, measured in its process."""
        return float(self._worker.ask(("forward_seconds", batch, num_tokens), FORWARD_LIMIT_SECONDS))

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """fp32 [tokens, vocab]: of every position of one sequence."""
        found = bytearray(self._worker.ask(("logits", tokens), FORWARD_LIMIT_SECONDS))
        return torch.frombuffer(found, dtype=torch.float32).view(len(tokens), -1)
