"""The server of --serve under clients that are idle, slow, many, or send what is no image: each gets the right answer,
and the server's memory stays bounded."""
import asyncio
import io
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from .conftest import picture
from .test_explore import BROKEN, good_image, png_header

SILENCE, REQUEST_TIME = 1.0, 3.0
MAX_MB = 150  # of memory beyond what the server has after its first image
SERVER = f"""
from ea_vision.visualize import explore, page_server
page_server.SILENCE, page_server.REQUEST_TIME = {SILENCE}, {REQUEST_TIME}
explore.main("--serve --port 0 --random --layers 1 --parts attn --max-megapixels 1 --max-upload-mb 1".split())
"""


class Served:
    """The server in a process of its own, so that its memory can be told from the clients'."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True)
        self.port = int(re.search(r":(\d+)/", self.process.stdout.readline())[1])

    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1000

    async def ask(self, head: str, body: bytes = b"", pause: float = 0, patience: float = 60) -> tuple[int, bytes]:
        """(status, body) of a request; with `pause` its body goes byte by byte. (0, b"") where it is just ended."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)

        async def send() -> None:
            writer.write(head.encode())
            for part in ([body] if not pause else [bytes([byte]) for byte in body]):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)

        sending = asyncio.create_task(send())
        try:
            answer = await asyncio.wait_for(reader.read(), patience)
        except ConnectionResetError:
            answer = b""
        finally:
            sending.cancel()
            writer.close()
        return int(answer.split()[1]) if answer else 0, answer.partition(b"\r\n\r\n")[2]

    def upload(self, data: bytes, name: str, **options):
        return self.ask(f"POST /image?name={name} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
                        f"Content-Type: image/png\r\nContent-Length: {len(data)}\r\n\r\n", data, **options)


@pytest.fixture(scope="module")
def served():
    served = Served()
    yield served
    served.process.terminate()
    assert "Traceback" not in served.process.communicate(timeout=300)[1]


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "png")
    return data.getvalue()


def hostile_images() -> list[bytes]:
    """50 files: too large in some way, cut off, damaged, or something else under the name of an image."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    files = [data for data, _ in BROKEN.values()]
    files += [png(Image.new("L", size)) for size in ((1, 400_000), (400_000, 1), (2, 300_000), (1, 999_999))]
    files += [png_header(100_000, 100_000), png_header(1, 2**31 - 1), png_header(0, 10), eps, b"GIF89a" + b"\xff" * 50,
              b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"RIFF\xff\xff\xff\xffWEBPVP8 ", b"II*\0" + b"\xff" * 100]
    draw = random.Random(0)
    whole = {kind: good_image() if kind == "jpeg" else png(picture(1)) for kind in ("jpeg", "png")}
    while len(files) < 50:
        data = bytearray(whole[draw.choice(("jpeg", "png"))])
        start = draw.randrange(8, len(data) // 2)
        files.append(bytes(data[:start]) + draw.randbytes(draw.randrange(40)))  # the rest replaced by noise
    return files


def test_it_answers_all_and_keeps_its_memory(served):
    async def soak():
        first = await served.upload(png(picture(0)), "first.png")
        assert first[0] == 200
        before, start = served.peak_mb(), time.monotonic()
        idle = [asyncio.create_task(served.ask("")) for _ in range(100)]
        slow = [asyncio.create_task(served.upload(bytes(1000), f"slow{i}.png", pause=0.3)) for i in range(20)]
        await asyncio.sleep(0.2)
        good = [served.upload(png(picture(i)), f"{i}.png") for i in range(60)]
        hostile = [served.upload(data, f"hostile{i}.png") for i, data in enumerate(hostile_images())]
        answers = await asyncio.gather(*good, *hostile)
        for index, (status, body) in enumerate(answers[:60]):
            assert status == 200 and json.loads(body)["name"] == f"{index}.png"
        for status, body in answers[60:]:
            assert status == 400 and json.loads(body)["error"]
        assert {(status, body) for status, body in await asyncio.gather(*idle)} == {(0, b"")}
        for status, body in await asyncio.gather(*slow):
            assert status == 408 and "more than 3" in json.loads(body)["error"]
        again = await served.upload(png(picture(0)), "first.png")
        assert again == first, "after all that, the answer is the same"
        return before, served.peak_mb(), time.monotonic() - start

    before, after, seconds = asyncio.run(soak())
    print(f"peak memory {before:.0f} MB before, {after:.0f} MB after; {seconds:.1f} s")
    assert after - before < MAX_MB


@pytest.mark.slow
def test_a_slow_client_is_ended_in_time(served):
    async def measure(request) -> float:
        start = time.monotonic()
        await request
        return time.monotonic() - start

    head = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nX: "
    for request, limit in ((served.ask(""), SILENCE), (served.ask(head, b"x" * 1000, pause=0.2), REQUEST_TIME),
                           (served.upload(bytes(1000), "slow.png", pause=0.2), REQUEST_TIME)):
        assert limit - 0.1 <= asyncio.run(measure(request)) < limit + 60


@pytest.mark.parametrize("length, status", [("9" * 5000, 400), ("-1", 400), ("1e3", 400), ("٣", 400), ("", 411),
                                            ("2000000", 413), ("0", 400)])
def test_content_lengths(served, length, status):
    head = (f"POST /image HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: image/png\r\n"
            f"Content-Length: {length}\r\n\r\n")
    got, body = asyncio.run(served.ask(head))
    assert got == status and 0 < len(json.loads(body)["error"]) < 300


@pytest.mark.parametrize("path", ["http://[", "/image?" + "&".join(["a=b"] * 5000), "/" + "x" * 70_000])
def test_addresses_that_make_no_sense(served, path):
    status, _ = asyncio.run(served.ask(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n"))
    assert status in (404, 414)
