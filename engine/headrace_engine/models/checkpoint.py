"""Reading safetensors checkpoints: one shard or several, tensor by tensor, with errors that name the file.

The only file that opens weight files.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors
import torch

from headrace_engine.models.errors import ModelError
from headrace_engine.models.names import Stored

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NUM_SAMPLES = 64  # blocks of each file that the digest reads; a whole-file hash would take as long as loading
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: "F32", "BF16", "I64", ...


class Checkpoint:
    """An open checkpoint folder; use as a context manager. Raises ModelError for a missing or damaged file."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._handles: dict[Path, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.files = _shard_files(folder)
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

    def read(self, name: str) -> torch.Tensor:
        """One tensor, possibly backed by the mapped file: copy it before the checkpoint closes."""
        file = self.tensors[name].file
        try:
            tensor: torch.Tensor = self._handles[file].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor

    def stored(self) -> list[Stored]:
        """Name, shape and type of every tensor."""
        return [Stored(name, item.shape, item.dtype) for name, item in self.tensors.items()]

    def _open(self, file: Path) -> None:
        try:
            handle = self._stack.enter_context(safetensors.safe_open(file, framework="pt"))
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                stored = handle.get_slice(name)
                if name in self.tensors:
                    raise ModelError(f"tensor {name} is in both {self.tensors[name].file} and {file}")
                self.tensors[name] = StoredTensor(file, tuple(stored.get_shape()), stored.get_dtype())
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged or incomplete: {error}") from error
        self._handles[file] = handle


def content_digest(files: list[Path]) -> str:
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


def _shard_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        if not single.is_file():
            raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} has no readable weight_map: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks files that {_INDEX} names: {', '.join(missing)}")
    return [folder / name for name in names]
