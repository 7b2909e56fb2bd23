"""`headrace-router`: flags, signals, exit codes (0 after a drain, 2 for bad flags, 1 for anything else)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import resource
import signal
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import uvloop

from headrace_engine.core import Role
from headrace_engine.router.app import Router, Source
from headrace_engine.router.config import MIB, Limits
from headrace_engine.router.group import Endpoint
from headrace_engine.router.kubernetes import ApiServer, EndpointSliceSource, NotInCluster
from headrace_engine.router.static import StaticSource

DESCRIPTION = """\
One OpenAI endpoint in front of prefill and decode groups.

Each request goes to the decode group with the fewest requests, which answers with a ticket, and with that ticket to
the prefill group with the fewest requests, which writes the KV into the decode group. A failure before the first byte
of the answer is retried on other groups. Unified groups get whole requests instead.
"""
EPILOG = """\
examples:
  headrace-router --static prefill=http://10.0.0.1:8000 --static decode=http://10.0.0.2:8000
  headrace-router --static unified=http://127.0.0.1:8001 --port 8000
  headrace-router --namespace serving --deployment v4-flash      in a pod: follows the Services v4-flash-prefill, ...

routes: /v1/completions /v1/chat/completions /v1/models /health /ready /metrics /state
"""
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

logger = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        "headrace-router",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--host", default="0.0.0.0", help="address to listen on (default %(default)s)")
    result.add_argument("--port", type=_port, default=8000, help="port to listen on; 0 picks one (default %(default)s)")
    result.add_argument("--model", metavar="NAME", help="what /v1/models says while no engine can be asked")
    result.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default %(default)s)"
    )
    where = result.add_argument_group("where the groups are: a static list, or a deployment in this cluster")
    where.add_argument(
        "--static",
        metavar="ROLE=URL",
        type=_endpoint,
        action="append",
        default=[],
        help="a group of role prefill, decode or unified by its leader's http://host:port; repeatable",
    )
    where.add_argument("--namespace", metavar="NS", type=_name, help="namespace of --deployment")
    where.add_argument(
        "--deployment", metavar="NAME", type=_name, help="DisaggDeployment whose EndpointSlices are followed"
    )
    _add_limits(result)
    return result


def _add_limits(result: argparse.ArgumentParser) -> None:
    limits = result.add_argument_group("limits of one request (seconds)")
    defaults = Limits()

    def add(flag: str, kind: Callable[[str], float], text: str) -> None:
        default = getattr(defaults, flag.removeprefix("--").replace("-", "_"))
        limits.add_argument(flag, metavar="N", type=kind, default=default, help=f"{text} (default {default:g})")

    add("--max-attempts", _count, "attempts on fresh groups before the first byte of the answer")
    add("--request-seconds", _seconds, "from the request's arrival to its last byte")
    add("--connect-seconds", _seconds, "to connect to an engine")
    add("--ticket-seconds", _seconds, "for a decode group to hand out the ticket")
    add("--prefill-seconds", _seconds, "for a prefill group to compute and push the prompt")
    add("--unresponsive-seconds", _seconds, "of silence, asked and unasked, before a group counts as lost")
    add("--group-seconds", _seconds, "to wait for a group that cools down after a connection failure")
    add("--idle-seconds", _seconds, "of silence in a stream before it counts as broken")
    add("--leave-seconds", _seconds_or_none, "after SIGTERM to go on taking requests, asking clients to connect anew")
    add("--drain-seconds", _seconds, "after that for streams to end; then they end with an error")
    add("--max-in-flight", _count, "requests at once; more get 429")
    limits.add_argument(
        "--max-body-mib",
        metavar="N",
        type=_count,
        default=defaults.max_body_bytes // MIB,
        help="size of a request body in MiB (default %(default)s)",
    )


def check(arguments: argparse.Namespace) -> str | None:
    """What is wrong with flags that are each right; None if nothing is."""
    if bool(arguments.static) == bool(arguments.deployment):
        return "give either --static (repeatable) or --namespace with --deployment"
    if bool(arguments.namespace) != bool(arguments.deployment):
        return "--namespace and --deployment go together"
    urls = [endpoint.url for endpoint in arguments.static]
    if len(set(urls)) != len(urls):
        return "the same URL stands twice in --static; a group has one role"
    roles = {endpoint.role for endpoint in arguments.static}
    if roles and roles not in ({Role.UNIFIED}, {Role.PREFILL, Role.DECODE}):
        given = ", ".join(sorted(roles))
        return f"--static has {given}; it needs unified groups only, or both prefill and decode groups"
    return None


def limits_of(arguments: argparse.Namespace) -> Limits:
    names = set(Limits.__dataclass_fields__) - {"max_body_bytes", "max_reply_bytes"}
    values = {name: getattr(arguments, name) for name in names}
    return Limits(**values, max_body_bytes=arguments.max_body_mib * MIB)


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser()
    arguments = flags.parse_args(argv)
    if problem := check(arguments):
        flags.error(problem)
    api = None
    if arguments.deployment:
        try:
            api = ApiServer.in_cluster()
        except NotInCluster as error:
            flags.error(str(error))
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _raise_file_limit()
    try:
        uvloop.run(_serve(arguments, api))
    except OSError as error:
        logger.error("cannot listen on %s:%d: %s", arguments.host, arguments.port, error)
        return 1
    return 0


async def _serve(arguments: argparse.Namespace, api: ApiServer | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    router = Router(arguments.model, limits_of(arguments))
    try:
        source: Source
        if api is not None:
            source = EndpointSliceSource(api, arguments.namespace, arguments.deployment, router.fleet)
        else:
            source = StaticSource(arguments.static, router.engines, router.fleet)
        port = await router.start(arguments.host, arguments.port, source)
        logger.info("listening on http://%s:%d", arguments.host, port)
        await stop.wait()
        logger.info("draining %d requests", len(router.relay.exchanges))
        await router.drain()
    finally:
        await router.stop()


def _raise_file_limit() -> None:
    """A request holds three sockets; the usual soft limit of 1024 files would end at 340 requests."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port (0 to 65535)")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


def _seconds_or_none(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _name(text: str) -> str:
    if not _DNS_LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no Kubernetes name (lower case letters, digits, '-')")
    return text


def _endpoint(text: str) -> Endpoint:
    role, separator, url = text.partition("=")
    if not separator or role not in list(Role):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=URL with a role of {', '.join(Role)}")
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise argparse.ArgumentTypeError(f"{url!r} is not http://host:port")
    return Endpoint(Role(role), f"{parts.scheme}://{parts.netloc}", parts.netloc, ready=False)


if __name__ == "__main__":
    raise SystemExit(main())
