"""The number formats that DeepSeek-V4.1 was trained to keep its cache in. No torch here."""

from __future__ import annotations

from headrace_engine.kv.records import CacheRecords, mxfp4, mxfp8, nvfp4
from headrace_engine.models.deepseek_v41.config import V41Config
from headrace_engine.models.deepseek_v41.names import FP8_BLOCK
from headrace_engine.models.rounding import NO_ROUNDING, FakeQuantization, Rounding


def trained_records(config: V41Config) -> CacheRecords:
    head_dim = config.head_dim
    return CacheRecords(window=mxfp8(head_dim), compressed=nvfp4(head_dim), index_key=mxfp4(config.index_dim))


def rounding(config: V41Config, fake_quantization: FakeQuantization) -> Rounding:
    if fake_quantization is FakeQuantization.NONE:
        return NO_ROUNDING
    rounds_inputs = fake_quantization is FakeQuantization.ALL
    return Rounding(trained_records(config), input_block=FP8_BLOCK[1] if rounds_inputs else 0)
