"""What the operating system is told about memory that is mapped from files. Advice only: it changes no result.

The one file that knows `madvise`. Where it is refused, pages are read when they are touched.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray


def expect_random_reads(x: torch.Tensor) -> None:
    """Touching a page reads that page and none around it; otherwise some 128 KiB come along."""
    _advise_whole(x, mmap.MADV_RANDOM)


def expect_sequential_reads(x: torch.Tensor) -> None:
    """Touching pages in order has those that follow read meanwhile; otherwise each stretch is waited for."""
    _advise_whole(x, mmap.MADV_SEQUENTIAL)


def read_ahead(x: torch.Tensor, rows: torch.Tensor) -> None:
    """Starts reading the pages of rows [N] int64 of x [R, n], without waiting for them. x contiguous, on the CPU."""
    if not x.nbytes or not len(rows):
        return
    advise = _madvise()
    for start, num_bytes in page_ranges(x.data_ptr(), x.nbytes // len(x), rows.numpy(), mmap.PAGESIZE).tolist():
        advise(start, num_bytes, mmap.MADV_WILLNEED)


def page_ranges(address: int, row_bytes: int, rows: NDArray[np.int64], page_bytes: int) -> NDArray[np.int64]:
    """[ranges, 2] (start, bytes) of the pages that hold the rows, whole pages, ascending, as few ranges as there are.

    Row i is at address + i * row_bytes.
    """
    starts = address + rows * row_bytes
    first, last = starts // page_bytes, (starts + row_bytes - 1) // page_bytes
    most = int((last - first).max()) + 1
    pages = np.unique(np.minimum(first[:, None] + np.arange(most), last[:, None]))
    is_start = np.diff(pages, prepend=pages[0] - 2) > 1
    begins = np.flatnonzero(is_start)
    lengths = np.diff(begins, append=len(pages))
    return np.stack([pages[begins] * page_bytes, lengths * page_bytes], axis=1)


def _advise_whole(x: torch.Tensor, advice: int) -> None:
    first = x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise()(first, x.data_ptr() + x.nbytes - first, advice)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    advise: Callable[[int, int, int], int] = function
    return advise
