"""The server behind `ea-vision explore --serve`: the page, and a place to send images to, for this machine only."""

from __future__ import annotations

import json
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ea_vision.base.errors import UsageError

HOST = "127.0.0.1"
TIMEOUT = 20  # seconds that a client may keep silent
LONGEST_NAME = 80
READ_ON = 64_000_000  # bytes of a refused upload that are still read, so that the answer reaches the client


class PageServer(ThreadingHTTPServer):
    """Holds what the requests need.

    Args:
        page: the HTML.
        view: name and bytes of an image file -> its entry in the page; runs for one image at a time. Raises UsageError
            with what is wrong with the image.
        port: 0 takes a free one.
        max_bytes: of an image file.

    Raises:
        UsageError: a port that is taken or is none.
    """

    daemon_threads = True

    def __init__(self, page: bytes, view: Callable[[str, bytes], dict[str, Any]], port: int, max_bytes: int):
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(f"--port {port} cannot be used: {error}; --port 0 takes a free one") from error
        self.page, self.view, self.max_bytes = page, view, max_bytes
        self.one_at_a_time = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, POST /image?name=NAME takes an image file as its body. No path leads to the disk."""

    server: PageServer
    timeout = TIMEOUT
    server_version, sys_version = "explore", ""

    def do_GET(self) -> None:
        self._answer(self._page)

    def do_POST(self) -> None:
        self._answer(self._image)

    def _answer(self, make) -> None:
        """Send what `make` gives, or why it gives nothing; the server goes on either way."""
        try:
            self._check_host()
            status, kind, body = HTTPStatus.OK, *make()
        except Refused as refused:
            status, kind, body = refused.status, "application/json", _json({"error": str(refused)})
        except (ConnectionError, TimeoutError):
            return
        except Exception:
            traceback.print_exc(file=sys.stderr)
            status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, "application/json"
            body = _json({"error": "the server failed on this image; its terminal says why"})
        try:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            if status != HTTPStatus.OK:
                self._read_on()
        except (ConnectionError, TimeoutError):
            pass  # the client has left

    def _read_on(self) -> None:
        """Read what a refused client still sends: closing at once would reset the connection under the answer."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(2)
        left = READ_ON
        while left > 0 and (chunk := self.connection.recv(65536)):  # rfile refuses to be read after a time-out
            left -= len(chunk)

    def _check_host(self) -> None:
        """Other sites must not reach the server through the browser, by a name that leads here or by a form."""
        own = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in own or (origin and origin not in {f"http://{host}" for host in own}):
            raise Refused(HTTPStatus.FORBIDDEN, f"this server answers {self.server.address} only")

    def _page(self) -> tuple[str, bytes]:
        if urlsplit(self.path).path != "/":
            raise Refused(HTTPStatus.NOT_FOUND, "there is / and /image, nothing else")
        return "text/html", self.server.page

    def _image(self) -> tuple[str, bytes]:
        address = urlsplit(self.path)
        if address.path != "/image":
            raise Refused(HTTPStatus.NOT_FOUND, "there is / and /image, nothing else")
        name = _clean(parse_qs(address.query).get("name", ["image"])[0])
        data = self._body()
        try:
            with self.server.one_at_a_time:
                return "application/json", _json(self.server.view(name, data))
        except UsageError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error

    def _body(self) -> bytes:
        """The request's body, within the limits."""
        kind = self.headers.get_content_type()
        if not kind.startswith("image/"):
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"an image file required, got {kind[:LONGEST_NAME]}")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a Content-Length in bytes required")
        if int(length) > self.server.max_bytes:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                          f"an image file of at most {self.server.max_bytes / 1e6:g} MB required, "
                          f"got {int(length) / 1e6:.1f} MB")
        try:
            data = self.rfile.read(int(length))
        except TimeoutError as error:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"the upload stopped for {TIMEOUT} seconds") from error
        if len(data) < int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, f"the upload ended after {len(data)} of {length} bytes")
        return data

    def log_message(self, *args: Any) -> None:
        """Quiet: the page shows what went wrong."""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _clean(name: str) -> str:
    """A name as a label: its last part, printable, not too long."""
    name = name.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(c for c in name if c.isprintable())[:LONGEST_NAME] or "image"


def serve(server: PageServer) -> None:
    """Serve until interrupted."""
    with server:
        print(f"open {server.address} in a browser; Ctrl-C ends", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")
