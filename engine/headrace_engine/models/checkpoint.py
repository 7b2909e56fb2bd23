"""Reading safetensors checkpoints: one shard or several, memory-mapped, tensor by tensor, with errors that name both.

The only file that reads weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors
import torch

from headrace_engine.models.errors import ModelError
from headrace_engine.models.headers import StoredTensor, read_headers, shard_files
from headrace_engine.models.read_ahead import ReadAhead, Span

_NUM_SAMPLES = 64  # blocks of each file that the digest reads; a whole-file hash would take as long as loading
_SAMPLE_BYTES = 4096


class Checkpoint:
    """An open checkpoint folder; use as a context manager. Raises ModelError for a missing or damaged file."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._handles: dict[Path, Any] = {}
        self.files = shard_files(folder)
        self.tensors = read_headers(self.files)
        try:
            for file in self.files:
                self._open(file)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def stored(self) -> list[StoredTensor]:
        """Every tensor of every shard."""
        return list(self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """One tensor over the mapped file's memory, which stays mapped as long as the tensor lives. Any thread."""
        file = self.tensors[name].file
        try:
            tensor: torch.Tensor = self._handles[file].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor

    def read_ahead(self, spans: Sequence[Span]) -> ReadAhead:
        """Has the spans brought into the page cache, in their order; ends with the checkpoint's context."""
        return self._stack.enter_context(ReadAhead(spans))

    def _open(self, file: Path) -> None:
        try:
            self._handles[file] = self._stack.enter_context(safetensors.safe_open(file, framework="pt"))
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged or incomplete: {error}") from error


def computation_digest(config: object, files: list[Path], dtype: str, fake_quantization: str) -> str:
    """Identity of what a model computes: hyper-parameters, weights, and the precision of the computation."""
    told = f"{config}|{_content_digest(files)}|{dtype}|{fake_quantization}"
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _content_digest(files: list[Path]) -> str:
    """Identity of the weights: each file's name, size, first bytes and evenly spread samples of the rest.

    Two checkpoints of different weights differ in practically every sampled block.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            for sample in range(_NUM_SAMPLES + 1):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // _NUM_SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
