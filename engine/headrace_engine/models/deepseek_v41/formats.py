"""The formats of DeepSeek-V4.1's packed caches: those it was trained for, and FP8 key/values. No torch here."""

from __future__ import annotations

from headrace_engine.kv.records import CacheRecords, mxfp4, mxfp8, nvfp4
from headrace_engine.models.deepseek_v41.config import V41Config
from headrace_engine.models.deepseek_v41.names import FP8_BLOCK
from headrace_engine.models.rounding import NO_ROUNDING, FakeQuantization, Rounding


def packed_caches(config: V41Config) -> dict[str, CacheRecords]:
    """By the cache dtype that asks for it."""
    window, index_key = mxfp8(config.head_dim), mxfp4(config.index_dim)
    return {
        "fp8": CacheRecords(window, window, index_key),
        "fp4": CacheRecords(window, nvfp4(config.head_dim), index_key),
    }


def rounding(config: V41Config, fake_quantization: FakeQuantization, cache_dtype: str) -> Rounding:
    if fake_quantization is FakeQuantization.NONE:
        return NO_ROUNDING
    caches = packed_caches(config)
    input_block = FP8_BLOCK[1] if fake_quantization is FakeQuantization.ALL else 0
    return Rounding(caches["fp4"], caches.get(cache_dtype), input_block=input_block)
