"""Has the system bring a checkpoint's tensors into its page cache before the threads that convert them get there.

Advice only: it changes no result, and this process holds none of the memory. Reading thus goes on while tensors are
converted, and ranks on a node that ask for the same pages have them read once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from types import TracebackType

from headrace_engine.models.headers import StoredTensor

MAX_AHEAD_BYTES = 128 << 20
# Of one request. Linux cuts what is longer than the device's largest transfer and than its window for sequential reads.
_REQUEST_BYTES = 1 << 20
_END_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file."""

    file: Path
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class ReadAhead:
    """A thread that asks for spans one after another, at most `max_ahead_bytes` beyond those that were taken.

    A context manager: the thread ends with the last span, or when the context is left. A span longer than
    max_ahead_bytes is never asked for.
    """

    def __init__(self, spans: Iterable[Span], max_ahead_bytes: int = MAX_AHEAD_BYTES) -> None:
        self._spans, self._max_ahead_bytes = spans, max_ahead_bytes
        self._changed = threading.Condition()
        self._num_asked = self._num_taken = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_END_SECONDS)  # longer only where a request hangs in the file system

    def took(self, num_bytes: int) -> None:
        """So many bytes more of the spans are in use or done with. Any thread."""
        with self._changed:
            self._num_taken += num_bytes
            self._changed.notify()

    def _run(self) -> None:
        descriptors: dict[Path, int] = {}
        with ExitStack() as stack:
            try:
                for span in self._spans:
                    if not self._waits_for_room(span.num_bytes):
                        return
                    if span.file not in descriptors:
                        descriptors[span.file] = os.open(span.file, os.O_RDONLY | os.O_CLOEXEC)
                        stack.callback(os.close, descriptors[span.file])
                    os.posix_fadvise(descriptors[span.file], span.start, span.num_bytes, os.POSIX_FADV_WILLNEED)
            except OSError as error:  # who reads the tensors meets the same error, and names them
                log.debug("reading ahead ends: %s", error)

    def _waits_for_room(self, num_bytes: int) -> bool:
        """Until so many bytes may be asked for; False: the context has been left."""
        with self._changed:
            self._num_asked += num_bytes
            self._changed.wait_for(
                lambda: self._is_closed or self._num_asked - self._num_taken <= self._max_ahead_bytes
            )
            return not self._is_closed


def reading_order(layers: Sequence[Sequence[StoredTensor]], num_at_once: int) -> list[Span]:
    """The spans of layers that are loaded `num_at_once` at a time: a request of each in turn, at most 1 MiB long.

    Within a layer, scales and then the rest, each in the order of the files: what is scaled needs its scales, which
    files keep elsewhere.
    """
    requests = [_requests(_joined(_by_need(tensors))) for tensors in layers]
    groups = (requests[first : first + num_at_once] for first in range(0, len(requests), num_at_once))
    return [span for group in groups for span in chain.from_iterable(zip_longest(*group)) if span is not None]


def _by_need(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    return sorted(tensors, key=lambda tensor: (not tensor.name.endswith("scale"), tensor.file, tensor.start))


def _joined(tensors: Iterable[StoredTensor]) -> list[Span]:
    """Where the tensors are, those that follow one another in a file as one."""
    spans: list[Span] = []
    for tensor in tensors:
        if spans and (spans[-1].file, spans[-1].end) == (tensor.file, tensor.start):
            spans[-1] = Span(tensor.file, spans[-1].start, tensor.end)
        else:
            spans.append(Span(tensor.file, tensor.start, tensor.end))
    return spans


def _requests(spans: Iterable[Span]) -> Iterator[Span]:
    for span in spans:
        for start in range(span.start, span.end, _REQUEST_BYTES):
            yield Span(span.file, start, min(start + _REQUEST_BYTES, span.end))
