"""The server of --serve answers this machine only, refuses what it should, and lives on."""
import http.client
import io
import json
import socket
import threading
from urllib.parse import quote

import pytest

from ea_vision.base.errors import UsageError
from ea_vision.recorder.inputs import read_image
from ea_vision.visualize import page_server
from ea_vision.visualize.page import build_page
from ea_vision.visualize.page_server import PageServer

from .conftest import picture
from .test_explore import BROKEN, good_image

MAX_BYTES, MAX_PIXELS = 200_000, 50_000_000


@pytest.fixture(scope="module")
def server(explorer):
    def view(name: str, data: bytes) -> dict:
        if name == "failing.png":
            raise RuntimeError("something nobody thought of")
        return explorer.view(name, read_image(io.BytesIO(data), name, MAX_PIXELS))

    page = build_page(explorer, [], upload={"maxBytes": MAX_BYTES, "maxPixels": MAX_PIXELS}).encode()
    with PageServer(page, view, 0, MAX_BYTES) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, method: str, path: str, body: bytes | None = None, **headers: str):
    """(status, body) of a request."""
    connection = http.client.HTTPConnection(page_server.HOST, server.server_port, timeout=300)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def send(server, data: bytes, name: str = "photo.jpg", kind: str = "image/jpeg"):
    status, content = ask(server, "POST", f"/image?name={quote(name, safe='')}", data, Content_Type=kind)
    return status, json.loads(content)


def test_the_page_and_an_image(server):
    status, page = ask(server, "GET", "/")
    assert status == 200 and page == server.page and b"connect-src 'self'" in page
    status, entry = send(server, good_image(), "../../<holiday>.jpg")
    assert status == 200 and entry["name"] == "<holiday>.jpg"
    assert len(entry["models"]) == 2 and "attn" in entry["models"][0]["streams"]


def test_it_is_bound_to_this_machine(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_uploads_get_a_message_and_the_server_lives(server, kind):
    data, _ = BROKEN[kind]
    status, answer = send(server, data)
    assert status == 400 and answer["error"]
    assert send(server, good_image())[0] == 200


def test_limits(server):
    status, answer = send(server, b"x" * (MAX_BYTES + 1))
    assert status == 413 and "at most 0.2 MB" in answer["error"]
    status, answer = send(server, b"<html>", kind="text/html")
    assert status == 415 and "got text/html" in answer["error"]
    status, answer = send(server, good_image(), "failing.png")
    assert status == 500 and "nobody thought of" not in answer["error"]
    assert ask(server, "GET", "/")[0] == 200


def test_an_upload_that_ends_early(server):
    with socket.create_connection((page_server.HOST, server.server_port), timeout=300) as client:
        client.sendall(f"POST /image HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: image/png\r\n"
                       "Content-Length: 5000\r\n\r\nabc".encode())
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
    assert b" 400 " in answer and b"ended after 3 of 5000 bytes" in answer


def test_an_upload_that_stops(server, monkeypatch, capsys):
    monkeypatch.setattr(page_server, "SILENCE", 0.3)
    with socket.create_connection((page_server.HOST, server.server_port), timeout=300) as client:
        client.sendall(f"POST /image HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: image/png\r\n"
                       "Content-Length: 5000\r\n\r\nabc".encode())
        assert b" 408 " in client.recv(4096)
        client.sendall(b"more")
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(10)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/%2e%2e/etc/passwd", "/explore.py", "//etc/passwd", "/image"])
def test_no_path_leads_to_the_disk(server, path):
    status, content = ask(server, "GET", path)
    assert status == 404 and b"nothing else" in content


def test_other_sites_cannot_use_it(server):
    assert ask(server, "GET", "/", Host="evil.example")[0] == 403
    status, _ = ask(server, "POST", "/image", good_image(), Content_Type="image/jpeg", Origin="http://evil.example")
    assert status == 403


def test_a_taken_port_is_refused(server):
    with pytest.raises(UsageError, match=f"--port {server.server_port}"):
        PageServer(b"", None, server.server_port, 1)


def test_images_at_once(server):
    """The network runs one image at a time; each gets its own answer."""
    answers = {}

    def one(index: int) -> None:
        data = io.BytesIO()
        picture(index).save(data, "png")
        answers[index] = send(server, data.getvalue(), f"{index}.png", "image/png")

    threads = [threading.Thread(target=one, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(answers[i][0], answers[i][1]["name"]) for i in range(4)] == [(200, f"{i}.png") for i in range(4)]
