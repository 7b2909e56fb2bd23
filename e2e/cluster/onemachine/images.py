"""placeholder"""
from __future__ import annotations

from pathlib import Path

from .console import Progress
from .files import digest_of
from .layers import Image, RunConfig, make_image
from .layout import Layout
from .registry import Registry
import tempfile, shutil

def ensure_pause(binary: Path, layout: Layout) -> Image:
    """The image of every pod's first container: one static binary."""
    image = Image("pause", digest_of([binary.read_bytes()]))
    registry = Registry()
    if not registry.has_manifest(image.name, image.tag):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(binary, Path(folder) / "pause")
            make_image(registry, image, None, Path(folder), RunConfig(entrypoint=["/pause"]), layout.cache / "tmp")
    return image
