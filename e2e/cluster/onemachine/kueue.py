"""Kueue, which admits groups of pods by quota: its manager as an image, and its chart, both of one version.

The Go module holds everything: the manager is compiled like kwok, and helm installs the chart from the same sources.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from .binaries import build_once, run_go
from .console import Progress, run
from .files import digest_of
from .layers import Image, RunConfig, make_image
from .layout import Layout
from .registry import Registry

VERSION = "v0.17.0"  # made for Kubernetes 1.35
MODULE = f"sigs.k8s.io/kueue@{VERSION}"
MANAGER = "manager"  # where the chart expects it: /manager


def ensure(layout: Layout, progress: Progress) -> Path:
    """Builds the manager unless it is there; returns a folder with `manager` and `chart`."""

    def build(draft: Path) -> None:
        progress(f"building Kueue {VERSION} (once; 4 to 8 minutes)")
        source = Path(json.loads(run(["go", "mod", "download", "-json", MODULE], "Kueue's sources"))["Dir"])
        go = ["go", "build", "-C", source, "-mod=readonly", "-gcflags=all=-dwarf=false", "-ldflags=-s -w"]
        # Its image holds nothing else, so it must not need a C library.
        run_go([*go, "-o", draft / MANAGER, "./cmd/kueue"], "building Kueue", progress, {"CGO_ENABLED": "0"})
        # The module cache is read-only, and so would the copy be.
        shutil.copytree(source / "charts" / "kueue", draft / "chart", copy_function=shutil.copyfile)
        for folder in (draft / "chart", *(path for path in (draft / "chart").rglob("*") if path.is_dir())):
            folder.chmod(0o755)

    return build_once(layout.bin / f"kueue-{VERSION}", "kueue-*", build)


def ensure_image(folder: Path, layout: Layout) -> Image:
    """The image of the manager in `folder`, made unless the registry has it. The registry must answer."""
    manager = folder / MANAGER
    image = Image("kueue", digest_of([VERSION, manager.read_bytes()]))
    registry = Registry()
    if not registry.has_manifest(image.name, image.tag):
        with tempfile.TemporaryDirectory() as root:
            shutil.copy(manager, Path(root) / MANAGER)
            Path(root).chmod(0o755)  # its user is not root
            make_image(registry, image, None, Path(root), RunConfig(entrypoint=[f"/{MANAGER}"]), layout.scratch)
    return image
