"""Small random models, each a complete checkpoint folder: for tests, and for pods without a download. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace_engine.models.deepseek_v4 import tiny as v4
from headrace_engine.models.deepseek_v4.tiny_tokenizer import write_tokenizer
from headrace_engine.models.deepseek_v41 import tiny as v41
from headrace_engine.models.errors import ModelError


class _Write(Protocol):
    def __call__(self, folder: Path, raw_config: dict[str, Any], seed: int, *, quantized: bool) -> None: ...


@dataclass(frozen=True)
class _Family:
    config: dict[str, Any]
    max_position: int  # tokens
    write: _Write


_V4_MAX_POSITION = v4.TINY_CONFIG["max_position_embeddings"]
_FAMILIES = {
    "v4": _Family(v4.TINY_CONFIG, _V4_MAX_POSITION, v4.write_checkpoint),
    "v4-0731": _Family(v4.TINY_0731_CONFIG, _V4_MAX_POSITION, v4.write_checkpoint),
    "v41": _Family(v41.TINY_CONFIG, v41.TINY_TEXT_CONFIG["max_position_embeddings"], v41.write_checkpoint),
}
FAMILIES = tuple(_FAMILIES)


def write_tiny(path: str | Path, family: str = "v4", seed: int = 0, *, quantized: bool = False) -> None:
    """Writes a checkpoint folder (config, weights under published names, tokenizer). Raises ModelError for a family.

    The files depend on nothing but the arguments. An existing folder's files of the same names are replaced.
    quantized: every tensor in the number format of the published checkpoints, in shards; else fp32 in one file.
    """
    if family not in _FAMILIES:
        raise ModelError(f"no tiny model of family {family!r} (known: {', '.join(FAMILIES)})")
    chosen = _FAMILIES[family]
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    chosen.write(folder, chosen.config, seed, quantized=quantized)
    write_tokenizer(folder, chosen.max_position)
