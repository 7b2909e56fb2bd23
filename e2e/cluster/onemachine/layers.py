"""Making an image without an image store: base layers are mounted, each new layer is one pass of tar and zstd."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .addresses import REGISTRY
from .children import CHILDREN
from .console import ClusterError
from .registry import LAYER_TYPE, MANIFEST_TYPE, Registry

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Image:
    """An image of the local registry."""

    name: str
    tag: str

    def __str__(self) -> str:
        return f"{REGISTRY}/{self.name}:{self.tag}"


@dataclass(frozen=True)
class RunConfig:
    """How a container of the image starts; None and missing variables are taken from the base."""

    env: Mapping[str, str] = field(default_factory=dict)
    entrypoint: Sequence[str] | None = None
    cmd: Sequence[str] | None = None


def make_image(
    registry: Registry, image: Image, base: Image | None, folder: Path, config: RunConfig, scratch: Path
) -> None:
    """Puts `image` = `base` plus one layer that holds what `folder` holds, as if `folder` were `/`.

    Modification times are kept: byte code is valid only for the time of its source. Owners become root. `scratch` is a
    folder with room for the compressed layer.
    """
    manifest, contents = _start_from(registry, image, base)
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=scratch) as compressed:
        content_digest, blob_digest = _pack(folder, Path(compressed.name))
        registry.put_file(image.name, Path(compressed.name), blob_digest)
        size_bytes = os.stat(compressed.name).st_size
    manifest["layers"].append({"mediaType": LAYER_TYPE, "digest": blob_digest, "size": size_bytes})
    contents["rootfs"]["diff_ids"].append(content_digest)
    contents["config"] = merged_config(contents.get("config") or {}, config)
    contents.pop("history", None)
    manifest["config"] = registry.put_json(image.name, contents)
    registry.put_manifest(image.name, image.tag, manifest)


def merged_config(base: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """The OCI `config` object of an image that adds `config` to its base's."""
    env = dict(entry.split("=", 1) for entry in base.get("Env") or [])
    env.update(config.env)
    merged = {**base, "Env": [f"{name}={value}" for name, value in sorted(env.items())]}
    if config.entrypoint is not None:
        merged["Entrypoint"] = list(config.entrypoint)
        merged.pop("Cmd", None)  # a base's default arguments mean nothing to another program
    if config.cmd is not None:
        merged["Cmd"] = list(config.cmd)
    return merged


def _start_from(registry: Registry, image: Image, base: Image | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and configuration of the base, whose blobs are then blobs of `image` too."""
    if base is None:
        empty = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": []}}
        return {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "layers": []}, empty
    manifest = registry.manifest(base.name, base.tag)
    contents = registry.config(base.name, manifest)
    if base.name != image.name:
        for layer in manifest["layers"]:
            registry.mount_blob(image.name, layer["digest"], base.name)
    return manifest, contents


def _pack(folder: Path, target: Path) -> tuple[str, str]:
    """Writes the folder to `target` as tar in zstd. Returns the digests of the tar and of the file."""
    as_root = ["--owner=0", "--group=0", "--numeric-owner"]
    tar_argv = ["tar", "--sort=name", *as_root, "-C", str(folder), "-c", "."]
    content, blob = hashlib.sha256(), hashlib.sha256()
    with (
        target.open("wb") as output,
        CHILDREN.child(tar_argv, stdout=subprocess.PIPE) as tar,
        CHILDREN.child(["zstd", "-1", "-T0", "-q", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as zstd,
    ):
        assert tar.stdout is not None
        assert zstd.stdin is not None

        def drain() -> None:
            assert zstd.stdout is not None
            while chunk := zstd.stdout.read(CHUNK_BYTES):
                blob.update(chunk)
                output.write(chunk)

        drainer = threading.Thread(target=drain)
        drainer.start()
        try:
            while chunk := tar.stdout.read(CHUNK_BYTES):
                content.update(chunk)
                zstd.stdin.write(chunk)
        finally:
            zstd.stdin.close()
            drainer.join()
        statuses = tar.wait(), zstd.wait()
    if statuses != (0, 0):
        raise ClusterError(f"packing {folder}: tar ended with status {statuses[0]}, zstd with {statuses[1]}")
    return f"sha256:{content.hexdigest()}", f"sha256:{blob.hexdigest()}"
