"""The project's images, made without an image store, each tagged with a digest of what it is made from.

    headrace-base             Debian with Python and a C compiler, from debootstrap
    headrace-torch            base + the engine's dependencies
    headrace-kernels          torch + the engine's CPU kernels, compiled for this machine
    headrace-operator-deps    base + the operator's and the router's dependencies
    headrace-engine           kernels + the source
    headrace-operator         operator-deps + the source

Only the last two change with the source; their one layer is small, so a change runs in a pod within seconds.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import dependencies, kernels, rootfs, source
from .console import Progress
from .files import digest_of
from .layers import Image, RunConfig, make_image
from .layout import Layout
from .registry import Registry

RECIPE_VERSION = "1"  # raise it when layers of the same content are made in another way
SITE_PACKAGES = "/opt/headrace/site-packages"
BIN = "/opt/headrace/bin"
ENVIRONMENT = {
    "PYTHONPATH": SITE_PACKAGES,
    "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONUNBUFFERED": "1",
}


def ensure_pause(binary: Path, layout: Layout) -> Image:
    """The image of every pod's first container: one static binary."""
    image = Image("pause", digest_of([binary.read_bytes()]))
    registry = Registry()
    if not registry.has_manifest(image.name, image.tag):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(binary, Path(folder) / "pause")
            make_image(registry, image, None, Path(folder), RunConfig(entrypoint=["/pause"]), layout.scratch)
    return image


@dataclass(frozen=True)
class Made:
    """The images of the present sources: those that others use, by the name they use, and those in between."""

    named: dict[str, Image]
    between: tuple[Image, ...]

    def references(self) -> dict[str, str]:
        return {name: str(image) for name, image in self.named.items()}

    def all(self) -> list[Image]:
        return [*self.named.values(), *self.between]


def ensure_all(layout: Layout, progress: Progress) -> Made:
    """Makes what is missing. The registry must answer."""
    maker = _Maker(layout, progress)
    base = maker.base()
    torch = maker.dependencies_of("headrace-torch", base, dependencies.ENGINE)
    compiled = maker.kernels(torch)
    operator_deps = maker.dependencies_of("headrace-operator-deps", base, dependencies.OPERATOR)
    named = {
        "base": base,
        "torch": torch,
        "operator": maker.code("headrace-operator", operator_deps, entrypoint="headrace-operator"),
        "engine": maker.code("headrace-engine", compiled, entrypoint="headrace-engine"),
    }
    return Made(named, (compiled, operator_deps))


def as_environment(names: dict[str, str]) -> str:
    """Lines for a shell to `source`: HEADRACE_ENGINE_IMAGE=... and so on."""
    return "\n".join(f"HEADRACE_{name.upper()}_IMAGE={reference}" for name, reference in names.items())


class _Maker:
    """Makes one image at a time, unless the registry has it."""

    def __init__(self, layout: Layout, progress: Progress) -> None:
        self._layout = layout
        self._progress = progress
        self._registry = Registry()
        self._scratch = layout.scratch
        self._scratch.mkdir(parents=True, exist_ok=True)

    def base(self) -> Image:
        image = Image("headrace-base", digest_of([RECIPE_VERSION, rootfs.recipe_digest()]))
        if not self._has(image):
            folder = rootfs.ensure(self._layout, self._progress)
            self._make(image, None, folder, RunConfig(env=ENVIRONMENT, cmd=["bash"]))
        return image

    def dependencies_of(self, name: str, base: Image, wanted: dependencies.Dependencies) -> Image:
        image = Image(name, digest_of([RECIPE_VERSION, base.tag, wanted.digest()]))
        if not self._has(image):
            self._progress(
                f"installing {wanted.name} dependencies (once for each change of {wanted.requirements[0].name})"
            )
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                site_packages = Path(folder) / SITE_PACKAGES.lstrip("/")
                dependencies.install(wanted, site_packages)
                self._make(image, base, Path(folder), RunConfig())
        return image

    def kernels(self, base: Image) -> Image:
        image = Image("headrace-kernels", digest_of([RECIPE_VERSION, base.tag, kernels.digest()]))
        if not self._has(image):
            self._progress("compiling the engine's CPU kernels (once for each change of their sources)")
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                target = Path(folder) / SITE_PACKAGES.lstrip("/") / kernels.IN_SITE_PACKAGES
                kernels.compile_into(target, rootfs.ensure(self._layout, self._progress))
                self._make(image, base, Path(folder), RunConfig())
        return image

    def code(self, name: str, base: Image, *, entrypoint: str) -> Image:
        image = Image(name, digest_of([RECIPE_VERSION, base.tag, source.digest()]))
        if not self._has(image):
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                source.lay_out(Path(folder), SITE_PACKAGES, BIN)
                self._make(image, base, Path(folder), RunConfig(entrypoint=[f"{BIN}/{entrypoint}"]))
        return image

    def _has(self, image: Image) -> bool:
        return self._registry.has_manifest(image.name, image.tag)

    def _make(self, image: Image, base: Image | None, folder: Path, config: RunConfig) -> None:
        folder.chmod(0o755)  # the layer's `.` becomes the container's /
        make_image(self._registry, image, base, folder, config, self._scratch)
        self._progress(f"made {image}")
