"""The formats of DeepSeek-V4's packed caches: those it was trained for, and FP8 throughout. No torch here."""

from __future__ import annotations

from headrace_engine.kv.records import CacheRecords, fp8_beside_rope, fp8_index, mxfp4
from headrace_engine.models.deepseek_v4.config import V4Config
from headrace_engine.models.deepseek_v4.names import FP8_BLOCK
from headrace_engine.models.errors import ModelError
from headrace_engine.models.rounding import NO_ROUNDING, FakeQuantization, Rounding


def packed_caches(config: V4Config) -> dict[str, CacheRecords]:
    """By the cache dtype that asks for it."""
    key_values = fp8_beside_rope(config.head_dim, config.rope_dim)
    return {
        "fp8": CacheRecords(key_values, key_values, fp8_index(config.index_dim)),
        "fp4": CacheRecords(key_values, key_values, mxfp4(config.index_dim)),
    }


def rounding(config: V4Config, fake_quantization: FakeQuantization, cache_dtype: str) -> Rounding:
    """Raises ModelError for an index width that cannot be transformed."""
    if fake_quantization is FakeQuantization.NONE:
        return NO_ROUNDING
    if config.index_dim & (config.index_dim - 1):
        raise ModelError(f"fake quantization needs an index_head_dim that is a power of two, not {config.index_dim}")
    caches = packed_caches(config)
    input_block = FP8_BLOCK[1] if fake_quantization is FakeQuantization.ALL else 0
    return Rounding(caches["fp4"], caches.get(cache_dtype), turns_index=True, input_block=input_block)
