"""Blanks the GPU code inside shared libraries for images that run where no GPU is.

libtorch is linked with every CUDA library, so the loader wants them all, but half of their bytes are GPU programs that
only a driver would read. They do not compress; as zeros they cost next to nothing to pack and to pull.
"""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin", b".cask_resource")  # as nvcc and NVIDIA's libraries name them
MIN_FILE_BYTES = 1 << 20
COPY_BYTES = 8 << 20


@dataclass(frozen=True)
class Range:
    """Bytes `start` to `end` (exclusive) of a file."""

    start: int
    end: int


def blank_below(folder: Path) -> int:
    """Blanks every shared library below `folder`; returns the number of bytes that became zeros.

    Files are replaced, never written to: they may be hard links into an installer's cache.
    """
    blanked = 0
    for path in sorted(folder.rglob("*.so*")):
        if path.is_symlink() or path.stat().st_size < MIN_FILE_BYTES:
            continue
        ranges = device_code(path)
        if ranges:
            _replace_without(path, ranges)
            blanked += sum(one.end - one.start for one in ranges)
    return blanked


def device_code(path: Path) -> list[Range]:
    """Where GPU code lies in a 64-bit little-endian ELF file, in order; nowhere in any other file."""
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            return []
        (table_offset,) = struct.unpack_from("<Q", header, 40)
        entry_size, num_entries, names_index = struct.unpack_from("<HHH", header, 58)
        file.seek(table_offset)
        table = file.read(entry_size * num_entries)
        # Of a section header: name (offset in the names), then at 24 the offset in the file and the size.
        entries = [
            (struct.unpack_from("<I", table, at)[0], *struct.unpack_from("<QQ", table, at + 24))
            for at in range(0, len(table), entry_size)
        ]
        if names_index >= len(entries):
            return []
        file.seek(entries[names_index][1])
        names = file.read(entries[names_index][2])
    found = [Range(offset, offset + size) for name, offset, size in entries if _name_at(names, name) in SECTIONS]
    return sorted(found, key=lambda one: one.start)


def _name_at(names: bytes, offset: int) -> bytes:
    return names[offset : names.find(b"\0", offset)]


def _replace_without(path: Path, ranges: list[Range]) -> None:
    """Writes the file anew with holes, which read as zeros, in place of the ranges."""
    size = path.stat().st_size
    draft = path.with_name(path.name + ".blanked")
    with path.open("rb") as source, draft.open("wb") as target:
        position = 0
        for gap in [*ranges, Range(size, size)]:
            source.seek(position)
            target.seek(position)
            while position < gap.start:
                chunk = source.read(min(COPY_BYTES, gap.start - position))
                target.write(chunk)
                position += len(chunk)
            position = gap.end
        target.truncate(size)
    shutil.copystat(path, draft)
    os.replace(draft, path)
