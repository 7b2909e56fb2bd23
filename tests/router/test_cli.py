"""Flags that are refused, with what the user reads; the real process from start to drain."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from headrace_engine.router.cli import limits_of, main, parser
from headrace_engine.router.config import Limits

P, D, U = "--static=prefill=http://h:1", "--static=decode=http://h:2", "--static=unified=http://h:3"

REFUSED = {
    "nothing": ([], "give either --static"),
    "both ways": ([P, D, "--namespace=n", "--deployment=d"], "give either --static"),
    "no namespace": (["--deployment=d"], "go together"),
    "no deployment": ([P, D, "--namespace=n"], "go together"),
    "prefill alone": ([P], "both prefill and decode"),
    "unified beside others": ([P, D, U], "unified groups only"),
    "one URL twice": ([D, "--static=prefill=http://h:2"], "stands twice"),
    "unknown role": (["--static=encode=http://h:1"], "with a role of prefill, decode, unified"),
    "no URL": (["--static=prefill"], "is not ROLE=URL"),
    "no scheme": (["--static=prefill=h:1"], "is not http://host:port"),
    "a path": (["--static=prefill=http://h:1/v1"], "is not http://host:port"),
    "a wild port": (["--static=prefill=http://h:99999"], "is not http://host:port"),
    "a port too high": (["--port=70000"], "no port"),
    "no attempts": (["--max-attempts=0"], "no whole number from 1 up"),
    "negative time": (["--ticket-seconds=-1"], "no positive number of seconds"),
    "time that is none": (["--ticket-seconds=nan"], "no positive number of seconds"),
    "no Kubernetes name": (["--namespace=N_1"], "no Kubernetes name"),
    "outside a cluster": (["--namespace=n", "--deployment=d"], "outside a cluster use --static"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_flags(flags, message, capsys, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SystemExit) as exit_:
        main(flags)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_limits_default_to_what_the_code_says_and_follow_their_flags():
    assert limits_of(parser().parse_args([P, D])) == Limits()
    changed = limits_of(parser().parse_args(["--max-attempts=5", "--idle-seconds=7.5", "--max-body-mib=1"]))
    assert (changed.max_attempts, changed.idle_seconds, changed.max_body_bytes) == (5, 7.5, 1024 * 1024)


def test_the_process_serves_and_exits_with_0_after_sigterm():
    command = [sys.executable, "-m", "headrace_engine.router.cli", "--host=127.0.0.1", "--port=0", "--model=m", P, D]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            base = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            with urllib.request.urlopen(base + "/state", timeout=5) as response:
                assert json.load(response)["model"] == "m"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(base + "/ready", timeout=5)
            assert refused.value.code == 503
            refused.value.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_a_port_that_is_taken_is_an_error_with_exit_code_1(caplog):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["--host=127.0.0.1", f"--port={taken.getsockname()[1]}", P, D]) == 1
    assert "cannot listen" in caplog.text


def test_the_router_imports_no_tensors():
    code = "import sys, headrace_engine.router.cli; print([m for m in ('torch', 'numpy', 'nixl') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
