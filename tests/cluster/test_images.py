"""Digests that name images, layers, and the blanking of GPU code, over small folders."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest
from e2e.cluster.onemachine import binaries, dependencies, devicecode, images, layers, mounts, source
from e2e.cluster.onemachine.devicecode import Range
from e2e.cluster.onemachine.files import digest_of, digest_of_files, write_if_changed
from e2e.cluster.onemachine.layers import RunConfig, merged_config
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_a_digest_tells_different_parts_apart(left: list[str], right: list[str]) -> None:
    assert (digest_of(left) == digest_of(right)) == (left == right)


def test_the_same_tree_in_another_folder_has_the_same_digest(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "package").mkdir(parents=True)
        (tmp_path / name / "package" / "module.py").write_text("x = 1\n")
    one, two = ([tmp_path / name / "package" / "module.py"] for name in ("one", "two"))
    assert digest_of_files(one, tmp_path / "one") == digest_of_files(two, tmp_path / "two")
    two[0].write_text("x = 2\n")
    assert digest_of_files(one, tmp_path / "one") != digest_of_files(two, tmp_path / "two")


def test_a_file_is_written_only_when_its_content_changes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    assert write_if_changed(path, "a")
    assert not write_if_changed(path, "a")
    assert write_if_changed(path, "b")
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_an_image_adds_to_the_environment_of_its_base() -> None:
    base = {"Env": ["A=1", "B=x=y"], "Cmd": ["bash"], "User": "7"}
    merged = merged_config(base, RunConfig(env={"A": "2"}))
    assert merged == {"Env": ["A=2", "B=x=y"], "Cmd": ["bash"], "User": "7"}


def test_an_entrypoint_replaces_the_default_command_of_the_base() -> None:
    assert merged_config({"Cmd": ["bash"]}, RunConfig(entrypoint=["/pause"])) == {"Env": [], "Entrypoint": ["/pause"]}


@pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")
def test_a_layer_holds_the_folder_as_root_with_its_times(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "opt").mkdir(parents=True)
    (folder / "opt" / "file").write_text("content")
    os.utime(folder / "opt" / "file", (1_000_000, 1_000_000))
    content_digest, blob_digest = layers._pack(folder, tmp_path / "layer")
    assert content_digest != blob_digest
    subprocess.run(["zstd", "-q", "-d", tmp_path / "layer", "-o", tmp_path / "layer.tar"], check=True)
    with tarfile.open(tmp_path / "layer.tar") as tar:
        member = tar.getmember("./opt/file")
    assert (member.uid, member.gid, member.mtime) == (0, 0, 1_000_000)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(layers.ClusterError, match="tar ended with status"):
        layers._pack(tmp_path / "missing", tmp_path / "layer")


def test_console_scripts_call_their_function() -> None:
    script = source.console_script("package.module:main")
    assert "from package.module import main" in script
    assert script.startswith("#!/usr/bin/python3\n")


def test_the_code_layer_holds_both_packages_and_every_console_script(tmp_path: Path) -> None:
    source.lay_out(tmp_path, images.SITE_PACKAGES, images.BIN)
    assert (tmp_path / "opt/headrace/site-packages/headrace_engine/__init__.py").exists()
    assert (tmp_path / "opt/headrace/site-packages/headrace_operator/__init__.py").exists()
    scripts = {path.name for path in (tmp_path / "opt/headrace/bin").iterdir()}
    assert scripts >= {"headrace", "headrace-operator", "headrace-engine", "headrace-router"}
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.parametrize("wanted", [dependencies.ENGINE, dependencies.OPERATOR], ids=lambda wanted: wanted.name)
def test_what_must_be_importable_is_in_the_requirements(wanted: dependencies.Dependencies) -> None:
    pinned = {
        re.sub(r"[-_.]+", "-", name).lower()
        for path in wanted.requirements
        for name in re.findall(r"^([\w.-]+)==", path.read_text(), re.MULTILINE)
    }
    brought_by = importlib.metadata.packages_distributions()
    for module in wanted.proof:
        names = {re.sub(r"[-_.]+", "-", name).lower() for name in brought_by[module.partition(".")[0]]}
        assert names & pinned, f"{module} is brought by {names}, which {wanted.name}'s requirements do not name"


def test_image_names_come_as_shell_variables() -> None:
    assert images.as_environment({"engine": "r/e:1"}) == "HEADRACE_ENGINE_IMAGE=r/e:1"


def elf(sections: dict[bytes, bytes]) -> bytes:
    """A 64-bit ELF file with nothing but these sections and their names."""
    names, name_offsets = b"\0", []
    for name in (*sections, b".shstrtab"):
        name_offsets.append(len(names))
        names += name + b"\0"
    contents, table, at = b"", b"", 64
    for offset, content in zip(name_offsets, [*sections.values(), names], strict=True):
        table += struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, at, len(content), 0, 0, 1, 0)
        contents += content
        at += len(content)
    header = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack(
        "<QIHHHHHH", at, 0, 64, 0, 0, 64, len(name_offsets), len(name_offsets) - 1
    )
    return header + contents + table


def test_only_gpu_sections_become_zeros(tmp_path: Path) -> None:
    sections = {b".text": b"t" * devicecode.MIN_FILE_BYTES, b".nv_fatbin": b"g" * 5000, b".rodata": b"r" * 100}
    library = tmp_path / "lib" / "libsample.so.1"
    library.parent.mkdir()
    library.write_bytes(elf(sections))
    cached = tmp_path / "cached.so"
    os.link(library, cached)
    assert devicecode.blank_below(library.parent) == 5000
    assert library.read_bytes() == elf({**sections, b".nv_fatbin": bytes(5000)})
    assert cached.read_bytes() == elf(sections), "a hard link into an installer's cache was written to"


@pytest.mark.parametrize(
    "content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100)], ids=["empty", "script", "32-bit"]
)
def test_other_files_hold_no_gpu_code(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.so"
    path.write_bytes(content)
    assert devicecode.device_code(path) == []


def test_ranges_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.so"
    path.write_bytes(elf({b".nv_fatbin": b"a" * 10, b".text": b"b" * 6, b"__nv_relfatbin": b"c" * 4}))
    assert devicecode.device_code(path) == [Range(64, 74), Range(80, 84)]


def test_mounts_are_taken_deepest_first_and_only_below_the_folder() -> None:
    proc_mounts = "o /c/a o\no /c/a/b o\no /cc/x o\no /c o\no /c/with\\040blank o\n"
    assert mounts.below(Path("/c"), proc_mounts) == ["/c/with blank", "/c/a/b", "/c/a"]


def test_an_interrupted_build_is_not_taken_for_a_finished_one_and_its_draft_goes_once_its_command_is_dead(
    tmp_path: Path,
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    abandoned = tmp_path / f"{binaries.DRAFT}{dead.pid}-x"
    being_filled = tmp_path / f"{binaries.DRAFT}{os.getpid()}-y"
    for draft in (abandoned, being_filled):
        draft.mkdir()

    def interrupted(draft: Path) -> None:
        (draft / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        binaries.build_once(tmp_path / "tool-1", "tool-*", interrupted)
    assert list(tmp_path.iterdir()) == [being_filled]
    binaries.build_once(tmp_path / "tool-1", "tool-*", lambda draft: (draft / "whole").touch())
    assert (tmp_path / "tool-1" / "whole").exists()
