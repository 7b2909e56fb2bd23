"""Conversions between fp32 and the stored number formats, inside Triton kernels (formats: `models.quantize`).

Everything rounds to nearest, ties to even, and saturates, as the packed records of `kv.records` do.
"""

from __future__ import annotations

import triton
import triton.language as tl

UE8M0 = tl.constexpr(0)  # how scales are stored
E4M3 = tl.constexpr(1)
FP32 = tl.constexpr(2)


@triton.jit
def e4m3_to_float(codes):
    """uint8, no NaN among them -> fp32."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_to_float(codes):
    """Integers whose low four bits are a code -> fp32. The same bits in float16, whose exponents are 14 larger."""
    bits = ((codes & 7).to(tl.uint16) << 9) | ((codes & 8).to(tl.uint16) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def ue8m0_to_float(codes):
    """uint8 e -> fp32 2^(e - 127), NaN for 255. The exponent field of fp32, but for 2^-127, which is subnormal."""
    wide = codes.to(tl.int32)
    bits = tl.where(wide == 0, 1 << 22, wide << 23)
    return tl.where(wide == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def float_to_e4m3(values):
    """fp32 within +-448 -> uint8. Done on bits, since the interpreter's own conversion does not round to nearest.

    A normal number keeps three bits of mantissa; adding 2^23 to one below 2^-6 rounds it to multiples of 2^-9.
    """
    magnitude = tl.abs(values)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(magnitude >= 0.015625, normal, subnormal)
    return (code | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float_to_e2m1(values):
    """fp32 -> codes 0 to 15, int32. Each comparison is with the middle between two values, won by the even code."""
    x = tl.abs(values)
    code = (x > 0.25).to(tl.int32) + (x >= 0.75).to(tl.int32) + (x > 1.25).to(tl.int32) + (x >= 1.75).to(tl.int32)
    code += (x > 2.5).to(tl.int32) + (x >= 3.5).to(tl.int32) + (x > 5.0).to(tl.int32)
    return code + ((values.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def float_to_ue8m0(values):
    """Positive normal fp32 -> the exponent (int32, with its bias of 127) of the smallest power of two not below."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
