"""Unmounting what containers and kubelets leave below the cluster's folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .console import ClusterError


def below(folder: Path, proc_mounts: str) -> list[str]:
    """Mount points below `folder`, deepest first, from the text of /proc/mounts."""
    prefix = f"{folder}/"
    points = [_unescape(line.split()[1]) for line in proc_mounts.splitlines() if len(line.split()) > 1]
    return sorted((point for point in points if point.startswith(prefix)), reverse=True)


def unmount_below(folder: Path) -> None:
    """Unmounts everything below `folder`. Raises ClusterError if something stays.

    Several passes: the kubelet bind-mounts its own folder, so one path may be mounted more than once.
    """
    for _ in range(5):
        points = below(folder, Path("/proc/mounts").read_text())
        if not points:
            return
        for start in range(0, len(points), 50):
            # Not one of the children that are ended when work is given up: it cleans up after them.
            subprocess.run(["umount", "-l", *points[start : start + 50]], capture_output=True, timeout=30)
    left = below(folder, Path("/proc/mounts").read_text())
    if left:
        raise ClusterError(
            f"cannot unmount {', '.join(left[:5])}" + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        )


def _unescape(mount_point: str) -> str:
    """/proc/mounts writes blanks as octal escapes."""
    return mount_point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
