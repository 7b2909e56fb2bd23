"""A process that answers questions ends with its owner, and tells why it ended before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bench.worker import Worker, WorkerError

ECHO = """
import os, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[-1]))
connection.send(os.getpid())
while True:
    question = connection.recv()
    if question == "fail":
        sys.exit("out of ideas")
    if question != "be silent":
        connection.send([question, question])
"""


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker("echo", [sys.executable, "-S", "-c", ECHO]) as started:
        yield started


def test_every_question_has_its_answer_and_nothing_runs_on_when_it_is_closed(worker: Worker) -> None:
    process = Path("/proc") / str(worker.receive(20))
    assert [worker.ask(text, 20) for text in ("a", "b")] == [["a", "a"], ["b", "b"]]
    assert process.exists()
    worker.close()
    assert not process.exists()
    worker.close()  # harmless when there is nothing left


def test_one_that_ends_instead_of_answering_shows_its_last_words(worker: Worker) -> None:
    worker.receive(20)
    with pytest.raises(WorkerError, match=r"echo ended\n  out of ideas"):
        worker.ask("fail", 20)
    with pytest.raises(WorkerError, match="echo ended"):
        worker.ask("anything", 20)


def test_one_that_does_not_answer_in_time_is_given_up(worker: Worker) -> None:
    worker.receive(20)
    with pytest.raises(WorkerError, match="echo: no answer in 0 s"):
        worker.ask("be silent", 0.01)


def test_a_command_that_is_not_there_is_an_error_at_once() -> None:
    with pytest.raises(FileNotFoundError):
        Worker("nothing", ["/no/such/interpreter"])
