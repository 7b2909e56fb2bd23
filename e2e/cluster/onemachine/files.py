"""Writing files so that a reader never sees half of one, and an unchanged file is left alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_if_changed(path: Path, text: str, *, mode: int = 0o644) -> bool:
    """Writes `text` to `path` unless that is what it holds. Returns whether it wrote.

    kube-proxy ends itself when its configuration file is rewritten, even with the same content.
    """
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_text(text)
    draft.chmod(mode)
    os.replace(draft, path)
    return True


def digest_of(parts: Iterable[str | bytes]) -> str:
    """Twelve hex digits that change when any part, or the division into parts, changes."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()[:12]


def digest_of_files(paths: Iterable[Path], relative_to: Path) -> str:
    """A digest of names and contents, the same for the same tree in another folder."""
    parts: list[str | bytes] = []
    for path in sorted(paths):
        parts += [str(path.relative_to(relative_to)), path.read_bytes()]
    return digest_of(parts)
