"""Do the tests notice a wrong formula? Breaks each in turn and prints which test fails first.

    python -m tests.reference.mutations [WORD ...]      (only those whose family or description has one of the words)

Every mutation is a change of one place in a copy of the engine, run on the torch references of the kernels, so that
nothing is compiled. It runs its family's files, named above its table, up to the first failure: a few seconds where a
test notices. One that no test can see is run only if a word asks for it. Exits with 1 if another one is not seen.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tests.reference import mutations_drafters, mutations_v4, mutations_v41
from tests.reference.mutation import PACKAGE, ROOT, Mutation, mutated

LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Family:
    name: str
    mutations: Sequence[Mutation]
    tests: tuple[str, ...]  # files


FAMILIES = (
    Family("DeepSeek-V4", mutations_v4.MUTATIONS, mutations_v4.TESTS),
    Family("DeepSeek-V4.1", mutations_v41.MUTATIONS, mutations_v41.TESTS),
    Family("drafters", mutations_drafters.MUTATIONS, mutations_drafters.TESTS),
)
# Imported once, before the children that run the tests are forked: it takes as long as they do.
_SLOW_IMPORTS = ("transformers", "transformers.models.deepseek_v4.modeling_deepseek_v4")


def first_failure(mutation: Mutation | None, tests: Sequence[str], scratch: Path) -> str | None:
    """The name of the first test that fails with the mutation, or with none; None if none does."""
    copy = scratch / "headrace_engine"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    if mutation is not None:
        file = copy / mutation.file
        file.write_text(mutated(mutation, file.read_text(encoding="utf-8")), encoding="utf-8")
    context = multiprocessing.get_context("fork")  # the child has torch already, and no engine yet
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_tests, args=(tests, scratch, sender))
    child.start()
    try:
        if not receiver.poll(LIMIT_SECONDS):
            raise TimeoutError(f"the tests did not end within {LIMIT_SECONDS} s")
        failure: str | None = receiver.recv()
        return failure
    finally:
        child.kill()
        child.join()


def _run_tests(tests: Sequence[str], scratch: Path, sender: Connection) -> None:
    """In a child: the tests on the engine in `scratch`, silently; sends the first failure's name, or None."""
    sys.path.insert(0, str(scratch))
    sys.dont_write_bytecode = True
    os.environ["HEADRACE_KERNELS"] = "reference"
    torch.set_num_threads(1)
    seen = _FirstFailure()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        files = [str(ROOT / test) for test in tests]
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files], plugins=[seen])
    sender.send(seen.name if seen.name or code == pytest.ExitCode.OK else f"pytest ended with {code!r}")


class _FirstFailure:
    """A pytest plugin."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid.rpartition("::")[2]


def main(words: list[str]) -> int:
    """words: of the command line."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    return sum([_print_table(family, words) for family in FAMILIES]) and 1


def _print_table(family: Family, words: list[str]) -> int:
    """How many mutations should have been seen and were not."""
    chosen = [m for m in family.mutations if not words or any(word in f"{family.name} {m.what}" for word in words)]
    if not chosen:
        return 0
    num_unseen = 0
    with tempfile.TemporaryDirectory() as scratch:
        failure = first_failure(None, family.tests, Path(scratch))
        print(
            f"{family.name}: {', '.join(family.tests)}\n{'nothing is changed':64} {failure or 'all pass'}", flush=True
        )
        if failure:
            return 1
        for mutation in chosen:
            if not mutation.can_be_seen and not words:
                print(f"{mutation.what:64} (cannot be seen)", flush=True)
                continue
            failure = first_failure(mutation, family.tests, Path(scratch))
            num_unseen += failure is None and mutation.can_be_seen
            note = "NOT SEEN" if mutation.can_be_seen else "not seen, as expected"
            print(f"{mutation.what:64} {failure or note}", flush=True)
    print()
    return num_unseen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
