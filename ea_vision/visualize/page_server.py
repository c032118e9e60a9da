"""The server behind `ea-vision explore --serve`: the page, and a place to send images to, for this machine only.

A request has SILENCE seconds between two bytes, and REQUEST_TIME for all of it; one image at a time goes through the
network.
"""

from __future__ import annotations

import io
import json
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ea_vision.base.errors import UsageError

HOST = "127.0.0.1"
SILENCE = 20  # seconds that a client may keep silent
REQUEST_TIME = 60  # seconds for a whole request to arrive, and again for its answer to be fetched
READ_ON = 2  # seconds in which a refused client's bytes are still read, so that the answer reaches it
CHUNK = 65536
LONGEST_NAME = 80


class Arriving(io.RawIOBase):
    """What a client sends. A read ends with TimeoutError after `silence` seconds, or `seconds` after the start."""

    def __init__(self, connection: socket.socket, silence: float, seconds: float):
        self.connection, self.silence, self.deadline = connection, silence, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(min(self.silence, left))
        return self.connection.recv_into(buffer)


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
    request_queue_size = 128

    def __init__(self, page: bytes, view: Callable[[str, bytes], dict[str, Any]], port: int, max_bytes: int):
        self.page, self.view, self.max_bytes = page, view, max_bytes
        self.network = ThreadPoolExecutor(max_workers=1)  # always the same thread: PyTorch keeps memory for each
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(f"--port {port} cannot be used: {error}; --port 0 takes a free one") from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request, client_address) -> None:
        """A client that breaks off is no fault of the server."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        self.network.shutdown(wait=False, cancel_futures=True)


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, POST /image?name=NAME takes an image file as its body. No path leads to the disk."""

    server: PageServer
    server_version, sys_version = "explore", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(Arriving(self.connection, SILENCE, REQUEST_TIME), CHUNK)

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
            self.connection.settimeout(REQUEST_TIME)  # for all of the answer
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
        except OSError:
            pass  # the client has left, or does not fetch its answer

    def _read_on(self) -> None:
        """Read what a refused client still sends: closing at once would reset the connection under the answer."""
        self.connection.shutdown(socket.SHUT_WR)
        rest, buffer = Arriving(self.connection, READ_ON, READ_ON), bytearray(CHUNK)
        while rest.readinto(buffer):
            pass

    def _check_host(self) -> None:
        """Other sites must not reach the server through the browser, by a name that leads here or by a form."""
        own = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in own or (origin and origin not in {f"http://{host}" for host in own}):
            raise Refused(HTTPStatus.FORBIDDEN, f"this server answers {self.server.address} only")

    def _address(self, path: str):
        """What the request asks for, which must be this path."""
        try:
            address = urlsplit(self.path)
        except ValueError:
            address = None
        if address is None or address.path != path:
            raise Refused(HTTPStatus.NOT_FOUND, "there is / and /image, nothing else")
        return address

    def _page(self) -> tuple[str, bytes]:
        self._address("/")
        return "text/html", self.server.page

    def _image(self) -> tuple[str, bytes]:
        name = _clean(parse_qs(self._address("/image").query).get("name", ["image"])[0])
        data = self._body()
        try:
            return "application/json", _json(self.server.network.submit(self.server.view, name, data).result())
        except UsageError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error

    def _length(self) -> int:
        """Bytes of the request's body, within the limits."""
        kind = self.headers.get_content_type()
        if not kind.startswith("image/"):
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"an image file required, got {kind[:LONGEST_NAME]}")
        text = self.headers.get("Content-Length", "").strip()
        if not text:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a Content-Length in bytes required")
        if not re.fullmatch("[0-9]{1,18}", text):
            raise Refused(HTTPStatus.BAD_REQUEST, "Content-Length must be a number of bytes of at most 18 digits, got "
                                                  f"{text[:LONGEST_NAME]} ({len(text)} characters)")
        if int(text) > self.server.max_bytes:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                          f"an image file of at most {self.server.max_bytes / 1e6:g} MB required, "
                          f"got {int(text) / 1e6:.1f} MB")
        return int(text)

    def _body(self) -> bytes:
        length, data = self._length(), io.BytesIO()
        while data.tell() < length:
            try:
                chunk = self.rfile.read1(min(CHUNK, length - data.tell()))
            except TimeoutError as error:
                raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"the upload stopped for {SILENCE} seconds, or took more "
                                                          f"than {REQUEST_TIME}") from error
            if not chunk:
                raise Refused(HTTPStatus.BAD_REQUEST, f"the upload ended after {data.tell()} of {length} bytes")
            data.write(chunk)
        return data.getvalue()

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
