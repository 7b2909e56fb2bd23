"""`headrace`: look at a deployment before, without and in a cluster."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace_operator import cli_history, cli_retry, cli_rollout, cli_status, names
from headrace_operator.manifests import ManifestError, load

_EPILOG = """\
examples:
  headrace validate docs/examples/tiny-2p1d.yaml
  headrace render docs/examples/tiny-2p1d.yaml | less
  headrace up docs/examples/tiny-1p1d.yaml --base-port 8000
  headrace status tiny-2p1d -n default
  headrace retry tiny-2p1d --role decode
  headrace plan-rollout docs/examples/tiny-2p1d.yaml
  headrace rollout undo tiny-2p1d

exit codes: 0 done; 1 a process, the cluster or the deployment failed; 2 bad flags or a bad file
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    args = _parser().parse_args(argv)
    try:
        code = args.run(args)
    except ManifestError as error:
        print(f"headrace: {error}", file=sys.stderr)
        code = 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader (a pager, head) has seen enough
        code = 0
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Prefill/decode-disaggregated serving: a DisaggDeployment describes it, in a cluster or here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    validate = commands.add_parser("validate", help="check a file against the rules that the API server applies")
    validate.add_argument("file", help="YAML or JSON file with one DisaggDeployment; - reads standard input")
    validate.set_defaults(run=_validate)

    render = commands.add_parser("render", help="print every object that the operator would make for a file")
    render.add_argument("file", help="YAML or JSON file with one DisaggDeployment; - reads standard input")
    render.add_argument("-o", "--output", choices=["yaml", "json"], default="yaml", help="default: %(default)s")
    render.add_argument("--engine-image", default="headrace-engine", help="where the file names none")
    render.add_argument("--router-image", default="headrace-operator", help="where the file names none")
    render.set_defaults(run=_render)

    up = commands.add_parser(
        "up",
        help="run the pods and the router of a file as local processes, in the foreground",
        description="Runs the same pods as the operator would, as processes on 127.0.0.1. Progress goes to stderr. "
        'When all is ready one JSON line goes to stdout: {"router": URL, "pods": [...]}. SIGTERM or Ctrl-C stops '
        "everything; a second one kills what is left. A group that loses a process is started again as a whole.",
    )
    up.add_argument("file", help="YAML or JSON file with one DisaggDeployment; - reads standard input")
    up.add_argument(
        "--base-port",
        type=int,
        default=8000,
        metavar="N",
        help="the router's port; pods use the three next each; 0: any free ports (default: %(default)s)",
    )
    up.add_argument(
        "--bin-dir", type=Path, metavar="DIR", help="folder of headrace-engine and headrace-router (default: our own)"
    )
    up.set_defaults(run=_up)

    cli_status.add_parser(commands)
    cli_retry.add_parser(commands)
    cli_rollout.add_parser(commands)
    cli_history.add_parser(commands)
    return parser


def _validate(args: argparse.Namespace) -> int:
    deployment = load(args.file)
    print(f"{names.KIND} {deployment.metadata.name} is valid")
    return 0


def _render(args: argparse.Namespace) -> int:
    from headrace_operator.decide import Defaults
    from headrace_operator.preview import preview

    bodies = preview(load(args.file), Defaults(args.engine_image, args.router_image))
    if args.output == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies}, indent=2))
    else:
        print(yaml.safe_dump_all(bodies, sort_keys=False), end="")
    return 0


def _up(args: argparse.Namespace) -> int:
    deployment = load(args.file)
    return asyncio.run(_run_up(deployment, args))


async def _run_up(deployment: Any, args: argparse.Namespace) -> int:
    from headrace_operator.local.up import LocalDeployment, PodFailed, say

    stop, kill = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (kill if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        local = LocalDeployment(deployment, args.base_port, args.bin_dir)
    except (ValueError, OSError) as error:
        say(str(error))
        return 2
    try:
        await local.run(stop, kill)
    except PodFailed as error:
        say(str(error))
        return 1
    except (ValueError, OSError) as error:
        say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    main()
