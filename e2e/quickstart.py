"""From nothing to a served token, on a real Kubernetes: `make quickstart`.

Brings up the one-machine cluster (or uses KUBECONFIG), installs the chart, applies docs/examples/tiny-2p1d.yaml, asks
one chat question through the router, and compares the tokens with a unified engine and with transformers. Progress goes
to stderr; stdout gets one JSON line. The exit code is non-zero if any comparison is false.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.support import headrace
from e2e.support.cluster import REPOSITORY, SetupError, discover
from e2e.support.progress import say, stage

EXAMPLE = "tiny-2p1d"
QUESTION = "What does a headrace do?"
NUM_TOKENS = 32


def question(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }


@contextlib.contextmanager
def local_unified(example: str) -> Iterator[str]:
    """`headrace up` of the unified example on this machine; yields its router's URL."""
    command = [
        str(Path(sys.executable).with_name("headrace")),
        "up",
        str(REPOSITORY / "docs" / "examples" / f"{example}.yaml"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {process.wait(timeout=30)}; see above")
        yield json.loads(line)["router"]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def run() -> dict[str, Any]:
    with stage("cluster, images"):
        cluster = discover()
    with stage("install the chart"):
        headrace.install(cluster)
    resource = headrace.example(EXAMPLE)
    name = resource["metadata"]["name"]
    model = resource["spec"]["model"]["name"]
    if cluster.get(headrace.KIND, name):
        # A revision keeps the image it was made with, so an old one would not show this tree.
        with stage(f"delete {name} of an earlier run"):
            cluster.kubectl("delete", headrace.KIND, name)
            headrace.wait_gone(cluster, name)
    began = time.monotonic()
    with stage(f"apply docs/examples/{EXAMPLE}.yaml, wait until it is Ready"):
        cluster.apply(resource)
        headrace.wait_ready(cluster, name)
        ready_seconds = time.monotonic() - began
    with cluster.service_url(name) as router:
        with stage(f"ask {router}: {QUESTION}"):
            answer = headrace.wait_answer(f"{router}/v1/chat/completions", question(model))
        choice = answer["choices"][0]
        say(f"  answer (random weights, so no sense): {choice['message']['content']!r}")
        with (
            stage("ask a unified engine the same (headrace up docs/examples/tiny-unified.yaml)"),
            local_unified("tiny-unified") as unified,
        ):
            unified_model = headrace.example("tiny-unified")["spec"]["model"]["name"]
            unified_answer = headrace.wait_answer(f"{unified}/v1/chat/completions", question(unified_model))
        with stage("ask transformers the same"):
            from e2e.support.reference import greedy_tokens

            expected = greedy_tokens(answer["prompt_token_ids"], NUM_TOKENS)
        return {
            "deployment": name,
            "ready_s": round(ready_seconds, 1),
            "tokens": choice["token_ids"],
            "equal_to_unified": choice["token_ids"] == unified_answer["choices"][0]["token_ids"],
            "equal_to_transformers": choice["token_ids"] == expected,
            "router": router,
        }


def main() -> int:
    try:
        result = run()
    except KeyboardInterrupt:
        say("stopped; the cluster is left as it is (make cluster-down removes it)")
        return 130
    except (SetupError, RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        say(f"failed: {error}")
        return 1
    print(json.dumps(result), flush=True)
    return 0 if result["tokens"] and result["equal_to_unified"] and result["equal_to_transformers"] else 1


if __name__ == "__main__":
    sys.exit(main())
