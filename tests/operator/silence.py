"""Stands between an operator and an API server: passes all requests on, and lets watches fall silent when told to."""

from __future__ import annotations

import contextlib
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_NOT_PASSED_ON = ("transfer-encoding", "connection", "content-length", "content-encoding")


class Silencer:
    """A plain HTTP server on a free port of this machine. `upstream`: host:port of a plain HTTP API server.

    A watch that is silent keeps its connection open and says nothing, as one does whose peer has died."""

    def __init__(self, upstream: str) -> None:
        self.is_silent = threading.Event()
        self._is_over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(upstream))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=30)

    def _handler(self, upstream: str) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_watch = "watch=true" in self.path
                connection = http.client.HTTPConnection(upstream, timeout=60)
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                    headers = {key: value for key, value in self.headers.items() if key.lower() != "accept-encoding"}
                    connection.request(self.command, self.path, body, headers)
                    answer = connection.getresponse()
                    self.send_response(answer.status)
                    for key, value in answer.getheaders():
                        if key.lower() not in _NOT_PASSED_ON:
                            self.send_header(key, value)
                    self.send_header("connection", "close")
                    self.end_headers()
                    while piece := answer.read1(65536):
                        if is_watch and outer.is_silent.is_set():
                            outer._is_over.wait()
                            return
                        self.wfile.write(piece)
                        self.wfile.flush()

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
