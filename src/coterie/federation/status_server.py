"""A page on this machine that shows how a federation is doing; it can change nothing.

::

    /              the page, which looks for news every two seconds
    /status.json   what it shows
    /metrics       the same for Prometheus
"""

from __future__ import annotations

import importlib.resources
import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from coterie.errors import CoterieError
from coterie.federation import prometheus
from coterie.federation.status import FederationStatus
from coterie.version import __version__

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ASSETS = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class StatusServer(ThreadingHTTPServer):
    """Serves the page; ``read`` looks how the federation is doing, one look at a time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, read: Callable[[], FederationStatus]) -> None:
        self.only_this_machine = host in LOOPBACK
        self._read, self._lock = read, threading.Lock()
        super().__init__((host, port), _Handler)

    def status(self) -> FederationStatus:
        with self._lock:
            return self._read()


class _Handler(BaseHTTPRequestHandler):
    server_version = f"coterie/{__version__}"
    sys_version = ""
    timeout: ClassVar[float] = 30.0  # seconds for a request to come in; nobody keeps a thread by saying nothing
    server: StatusServer

    def do_GET(self) -> None:
        """Answer; whatever else is asked gets a 501 from the base class."""
        # A page elsewhere can have its own name point to this machine, and would read what is shown here.
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0].strip("[]") or "127.0.0.1"
        if self.server.only_this_machine and host not in LOOPBACK:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"only for this machine\n")
            return
        path = self.path.partition("?")[0]
        try:
            if path in _ASSETS:
                name, kind = _ASSETS[path]
                content = (importlib.resources.files("coterie.federation") / "assets" / name).read_bytes()
                self._answer(HTTPStatus.OK, f"{kind}; charset=utf-8", content)
            elif path == "/status.json":
                text = json.dumps(asdict(self.server.status()), ensure_ascii=False, allow_nan=False)
                self._answer(HTTPStatus.OK, "application/json", text.encode())
            elif path == "/metrics":
                self._answer(HTTPStatus.OK, prometheus.CONTENT_TYPE, prometheus.text_of(self.server.status()).encode())
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is /, /status.json and /metrics\n")
        except CoterieError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: a look every two seconds is no news."""

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
