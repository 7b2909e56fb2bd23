"""The project's own code as an image layer: packages, console scripts and the metadata of a distribution."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from .files import digest_of, digest_of_files
from .layout import PROJECT_ROOT

PACKAGES = (
    PROJECT_ROOT / "operator" / "headrace_operator",
    PROJECT_ROOT / "engine" / "headrace_engine",
)
PYPROJECT = PROJECT_ROOT / "pyproject.toml"


def digest() -> str:
    """Changes with every file of the packages, and with pyproject.toml (version, console scripts)."""
    parts = [digest_of_files(_files(package), package) for package in PACKAGES]
    return digest_of([*parts, PYPROJECT.read_bytes(), Path(__file__).read_bytes()])


def lay_out(root: Path, site_packages: str, bin_folder: str) -> None:
    """Writes packages, metadata and console scripts below `root`, which stands for `/`."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    target = root / site_packages.lstrip("/")
    for package in PACKAGES:
        for path in _files(package):
            copy = target / package.name / path.relative_to(package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    metadata = target / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    metadata.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    scripts = root / bin_folder.lstrip("/")
    scripts.mkdir(parents=True)
    for name, entry_point in project["scripts"].items():
        (scripts / name).write_text(console_script(entry_point))
        (scripts / name).chmod(0o755)


def console_script(entry_point: str) -> str:
    """`package.module:function` -> the program that an installer would write for it."""
    module, _, function = entry_point.partition(":")
    return f"#!/usr/bin/python3\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"


def _files(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
