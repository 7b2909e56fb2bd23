"""Which old images go, and that the others stay whole, with a real registry."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.onemachine import pruning
from e2e.cluster.onemachine.addresses import REGISTRY
from e2e.cluster.onemachine.console import Progress, wait_until
from e2e.cluster.onemachine.layers import Image, RunConfig, make_image
from e2e.cluster.onemachine.layout import Layout
from e2e.cluster.onemachine.pruning import Tag
from e2e.cluster.onemachine.registry import Registry
from hypothesis import given
from hypothesis import strategies as st

HOUR = 3600.0
NOW = 100 * HOUR


def tag(tag: str, age_hours: float, name: str = "engine", blobs: tuple[tuple[str, int], ...] = ()) -> Tag:
    return Tag(name, tag, NOW - age_hours * HOUR, blobs)


@pytest.mark.parametrize(
    ("ages_hours", "in_use", "going"),
    [
        ([2, 3, 4], set(), set()),
        ([2, 3, 4, 5], set(), {"3"}),
        ([5, 4, 3, 2], set(), {"0"}),
        ([2, 3, 4, 5, 6], {"engine:3"}, {"4"}),
        ([0.1, 0.2, 0.3, 0.4, 0.9, 1.1], set(), {"5"}),
    ],
    ids=["few", "the oldest goes", "by age, not by order", "in use", "young ones may be about to be used"],
)
def test_an_image_goes_when_it_is_neither_new_nor_in_use(
    ages_hours: list[float], in_use: set[str], going: set[str]
) -> None:
    tags = [tag(str(index), age) for index, age in enumerate(ages_hours)]
    assert {one.tag for one in pruning.outdated(tags, in_use, NOW)} == going


def test_each_name_keeps_its_own_newest() -> None:
    tags = [tag(str(age), age, name) for name in ("engine", "operator") for age in range(2, 6)]
    assert sorted(map(str, pruning.outdated(tags, set(), NOW))) == ["engine:5", "operator:5"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 50)), max_size=12), st.sets(st.integers(0, 11)))
def test_what_is_in_use_never_goes(shape: list[tuple[str, float]], used: set[int]) -> None:
    tags = [tag(str(index), age, name) for index, (name, age) in enumerate(shape)]
    in_use = {str(one) for index, one in enumerate(tags) if index in used}
    assert not in_use & set(map(str, pruning.outdated(tags, in_use, NOW)))


def test_a_blob_that_a_kept_image_shares_frees_nothing() -> None:
    old = tag("old", 5, blobs=(("shared", 100), ("own", 7)))
    older = tag("older", 6, blobs=(("shared", 100), ("own", 7), ("config", 1)))
    assert pruning.freed_bytes([tag("new", 1, blobs=(("shared", 100),)), old, older], [old, older]) == 8


def test_images_are_found_anywhere_in_objects() -> None:
    objects = {
        "image": f"{REGISTRY}/headrace-engine:ab12",
        "env": [{"name": "ENGINE_IMAGE", "value": f"{REGISTRY}/headrace-operator:cd34"}],
        "imageID": f"{REGISTRY}/headrace-engine@sha256:00",
        "other": "docker.io/library/busybox:1",
    }
    assert pruning.references_in(json.dumps(objects)) == {"headrace-engine:ab12", "headrace-operator:cd34"}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A real registry on a free port, with the configuration file tmp_path/registry.yaml."""
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    content = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (tmp_path / "registry.yaml").write_text(json.dumps(content))
    server = subprocess.Popen(["docker-registry", "serve", tmp_path / "registry.yaml"], stderr=subprocess.DEVNULL)
    client = Registry(f"http://127.0.0.1:{port}")
    try:
        wait_until("the registry answers", client.answers, timeout_seconds=30)
        yield client
    finally:
        server.kill()
        server.wait()


def test_pruning_frees_old_layers_and_leaves_the_other_images_whole(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "WORTHWHILE_BYTES", 1)
    layout = Layout(tmp_path)
    storage = tmp_path / "registry" / "docker" / "registry" / "v2"

    def push(version: int) -> None:
        folder = tmp_path / f"content-{version}"
        folder.mkdir(exist_ok=True)
        (folder / "file").write_bytes(os.urandom(100_000))
        make_image(registry, Image("app", str(version)), None, folder, RunConfig(), tmp_path / "tmp")

    for version in range(5):
        push(version)
        link = pruning.tag_folder(storage, "app") / str(version) / "current" / "link"
        os.utime(link, (version, version))
    pruning.prune(layout, tmp_path / "registry.yaml", {"app:0"}, time.time(), Progress())

    assert [version for version in range(5) if registry.has_manifest("app", str(version))] == [0, 2, 3, 4]
    blobs = [path for path in storage.glob("blobs/sha256/*/*/data") if path.stat().st_size > 50_000]
    assert len(blobs) == 4, "the layer of the removed image is still there"
    for version in (0, 2, 3, 4):
        manifest = registry.manifest("app", str(version))
        assert registry.config("app", manifest)["rootfs"]["type"] == "layers"
    push(1)
    assert registry.has_manifest("app", "1"), "a removed image cannot be made again"


def test_little_to_free_is_left_alone(registry: Registry, tmp_path: Path) -> None:
    folder = tmp_path / "content"
    folder.mkdir()
    for version in range(5):
        (folder / "file").write_text(str(version))
        make_image(registry, Image("app", str(version)), None, folder, RunConfig(), tmp_path / "tmp")
    pruning.prune(Layout(tmp_path), tmp_path / "registry.yaml", set(), time.time() + 9 * HOUR, Progress())
    assert all(registry.has_manifest("app", str(version)) for version in range(5))
