"""The compiled kernels as Python callables: loads the library on first use, or decides that torch must do.

HEADRACE_KERNELS=reference keeps to torch; a target's name (`generic`, `avx2`, ...) loads that target's library.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any

import torch

from headrace_engine.kernels import build

logger = logging.getLogger(__name__)

# Arguments of each function, in order: i int, l int64, f float, p pointer (None is null).
_KINDS = {"i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}
_SIGNATURES = {
    "packs": "",
    "fp4": "i pp ll p",
    "fp8": "i pp llll p",
    "pack": "p ll p",
    "pack_bytes": "p ll p",
    "norm_rope": "i pppp lllll fi p",
    "linear": "iii pp llll p",
    "hc_mix": "i ppppp llll ff p pppp",
    "hc_head": "i ppppp lll ff p",
    "hc_update": "i pppp lll",
    "experts": "iii ppppppp lllll f p",
    "round_rows": "i p l lllll if p",
    "write_records": "i pl pll pp lllll if",
    "read_records": "i pll lpp lllll if p",
    "sum_choices": "i p lll p",
    "route": "i pppp llll f pp",
    "attention": "i pp ppppp ll pll ppp plll pl llll f l p",
    "write_ring": "i p ppp l plll",
    "select_entries": "ii pp ppp ll pll llll p llp",
    "compress": "ii plp pppp ll pll pp llll f pll",
}
_DTYPES = (torch.float32, torch.bfloat16)


def library_for(x: torch.Tensor) -> Any | None:
    """The kernels that work on a tensor of this device and dtype; None: use the reference."""
    return library() if x.is_cpu and x.dtype in _DTYPES else None


@functools.cache
def library() -> Any | None:
    """The kernels of this process, loaded once; None where there are none, which is logged once."""
    choice = os.environ.get("HEADRACE_KERNELS", "")
    if choice == "reference":
        return None
    if choice and choice not in build.TARGETS:
        raise ValueError(f"HEADRACE_KERNELS={choice!r}: choose reference, {', '.join(build.TARGETS)}")
    try:
        return load(choice or None)
    except build.BuildError as error:
        logger.warning("CPU kernels are not available, torch runs instead, several times slower: %s", error)
        return None


def load(target: str | None = None) -> Any:
    """The library of a target (default: this CPU's best), with typed functions. Raises build.BuildError."""
    path = build.find_or_build(target)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise build.BuildError(f"cannot load {path}: {error}; delete the file to have it compiled again") from error
    for name, kinds in _SIGNATURES.items():
        function = getattr(loaded, f"headrace_{name}")
        function.argtypes = [_KINDS[kind] for kind in kinds if kind != " "]
        function.restype = ctypes.c_int if name == "packs" else None
    return loaded


def is_wide(x: torch.Tensor, numel: int) -> bool:
    """Whether x is so many contiguous fp32 numbers: a kernel reads raw memory, so its door must be narrow."""
    return x.dtype is torch.float32 and x.numel() == numel and x.is_contiguous()
