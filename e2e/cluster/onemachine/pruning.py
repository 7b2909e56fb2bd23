"""Removing old images from the local registry. Nodes remove what no container uses by themselves (nodes.py).

Works on the registry's folder: the HTTP interface tells no age and gives no bytes back. Nothing may upload meanwhile;
the command lock sees to that.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from .addresses import REGISTRY
from .console import Progress, run
from .layout import Layout

NUM_KEPT = 3  # of each name, besides those in use
MIN_AGE_SECONDS = 3600  # a younger image may be about to be used
WORTHWHILE_BYTES = 1 << 30
REFERENCE = re.compile(re.escape(REGISTRY) + r"/([\w./-]+:[\w.-]+)")


@dataclass(frozen=True)
class Tag:
    """One tag of the registry: `name:tag`, when it was pushed (Unix time), and the size of each of its blobs."""

    name: str
    tag: str
    pushed: float
    blobs: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


def references_in(text: str) -> set[str]:
    """`name:tag` of every image of the local registry that a text, such as objects as JSON, mentions."""
    return set(REFERENCE.findall(text))


def outdated(tags: Iterable[Tag], in_use: Collection[str], now: float) -> list[Tag]:
    """Tags that are not in use, not among the newest of their name and not young."""
    by_name: dict[str, list[Tag]] = {}
    for tag in tags:
        by_name.setdefault(tag.name, []).append(tag)
    found = []
    for of_name in by_name.values():
        of_name.sort(key=lambda tag: tag.pushed, reverse=True)
        found += [tag for tag in of_name[NUM_KEPT:] if str(tag) not in in_use and now - tag.pushed > MIN_AGE_SECONDS]
    return found


def freed_bytes(tags: Collection[Tag], going: Collection[Tag]) -> int:
    """Size of the blobs that no tag has once those `going` are gone."""
    kept = {digest for tag in tags if tag not in going for digest, _ in tag.blobs}
    freed = {digest: size for tag in going for digest, size in tag.blobs if digest not in kept}
    return sum(freed.values())


def prune(layout: Layout, config: Path, in_use: Collection[str], now: float, progress: Progress) -> None:
    """Removes outdated tags and their blobs where that frees much; `config` is the registry's configuration file."""
    storage = layout.registry / "docker" / "registry" / "v2"
    tags = read_tags(storage)
    going = outdated(tags, in_use, now)
    size_bytes = freed_bytes(tags, going)
    if size_bytes < WORTHWHILE_BYTES:
        return
    for tag in going:
        shutil.rmtree(tag_folder(storage, tag.name) / tag.tag)
    run(["docker-registry", "garbage-collect", "--delete-untagged", config], "removing old images", timeout_seconds=300)
    progress(f"removed {len(going)} old images from the registry: {size_bytes / 1e9:.1f} GB")


def tag_folder(storage: Path, name: str) -> Path:
    return storage / "repositories" / name / "_manifests" / "tags"


def read_tags(storage: Path) -> list[Tag]:
    """Every tag in the registry's folder whose manifest is there."""
    tags = []
    for link in storage.glob("repositories/*/_manifests/tags/*/current/link"):
        digest = link.read_text().strip()
        manifest = _blob(storage, digest)
        if manifest.exists():
            content = json.loads(manifest.read_text())
            blobs = tuple((blob["digest"], blob["size"]) for blob in (content["config"], *content["layers"]))
            tags.append(Tag(link.parents[4].name, link.parents[1].name, link.stat().st_mtime, blobs))
    return tags


def _blob(storage: Path, digest: str) -> Path:
    algorithm, _, hexadecimal = digest.partition(":")
    return storage / "blobs" / algorithm / hexadecimal[:2] / hexadecimal / "data"
