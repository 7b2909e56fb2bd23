"""The number formats that DeepSeek-V4 was trained to keep its cache in. No torch here."""

from __future__ import annotations

from headrace_engine.kv.records import CacheRecords, fp8_beside_rope, mxfp4
from headrace_engine.models.deepseek_v4.config import V4Config
from headrace_engine.models.deepseek_v4.names import FP8_BLOCK
from headrace_engine.models.errors import ModelError
from headrace_engine.models.rounding import NO_ROUNDING, FakeQuantization, Rounding


def trained_records(config: V4Config) -> CacheRecords:
    key_values = fp8_beside_rope(config.head_dim, config.rope_dim)
    return CacheRecords(window=key_values, compressed=key_values, index_key=mxfp4(config.index_dim))


def rounding(config: V4Config, fake_quantization: FakeQuantization) -> Rounding:
    """Raises ModelError for an index width that cannot be transformed."""
    if fake_quantization is FakeQuantization.NONE:
        return NO_ROUNDING
    if config.index_dim & (config.index_dim - 1):
        raise ModelError(f"fake quantization needs an index_head_dim that is a power of two, not {config.index_dim}")
    rounds_inputs = fake_quantization is FakeQuantization.ALL
    return Rounding(trained_records(config), turns_index=True, input_block=FP8_BLOCK[1] if rounds_inputs else 0)
