"""The ground of every image: a small Debian with Python and a C compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

from . import mounts
from .binaries import build_once
from .console import Progress, run
from .files import digest_of
from .layout import Layout

SUITE = "bookworm"  # its Python is 3.11, the project's
PACKAGES = (
    "python3",
    "ca-certificates",
    "g++",  # the engine's CPU kernels are compiled with it, for the machine that they run on
    "iproute2",  # to look around in a pod
    "procps",
)
# Nobody reads manuals in a container.
DROPPED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var/cache/apt", "var/lib/apt/lists")


def recipe_digest() -> str:
    return digest_of([SUITE, *PACKAGES, *DROPPED])


def ensure(layout: Layout, progress: Progress) -> Path:
    """Makes the folder unless it is there; returns it."""

    def build(draft: Path) -> None:
        progress(f"installing Debian {SUITE} for images (once; about a minute)")
        argv = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, draft]
        try:
            run(argv, "debootstrap", timeout_seconds=900)
        finally:
            mounts.unmount_below(draft)  # it mounts /proc and /sys, and does not unmount them when it is killed
        for folder in DROPPED:
            shutil.rmtree(draft / folder, ignore_errors=True)
            (draft / folder).mkdir(parents=True)
        for device in (draft / "dev").iterdir():  # containers get their own
            shutil.rmtree(device) if device.is_dir() and not device.is_symlink() else device.unlink()

    return build_once(layout.cache / f"rootfs-{recipe_digest()}", "rootfs-*", build)
