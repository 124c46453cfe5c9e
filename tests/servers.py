"""Real servers for the tests: S3 by moto, Azure by Azurite, and a proxy that gets in the way.

Owns: starting them on loopback, waiting until they answer, ending them. Does not own: what is
asked of them.

moto checks ``If-None-Match`` and writes in two steps, in several threads: of eight clients that
create one name at once, two win about once in six hundred tries. A real S3 decides this in one
step, so whoever races goes through the proxy, which lets one PUT at a time through.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

HOST = "127.0.0.1"
READY_SECONDS = 60.0
AZURITE = "3.35.0"
TOOLS = Path(__file__).parent.parent / ".tools"
BUCKET = "bucket"

_OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ENETUNREACH", "EHOSTUNREACH", "ECONNREFUSED", "ETIMEDOUT")


class ServerMissing(Exception):
    """This machine cannot run the server, for the reason given."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@contextmanager
def _running(command: Callable[[int], list[str]], answers: Callable[[int], bool]) -> Iterator[int]:
    """A server process on a free port, ready when ``answers`` says so."""
    for attempt in range(3):
        port = free_port()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command(port), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            try:
                deadline = time.monotonic() + READY_SECONDS
                while process.poll() is None and time.monotonic() < deadline:
                    if answers(port):
                        yield port
                        return
                    time.sleep(0.02)
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
        if attempt == 2 or "use" not in said.lower():  # another process was faster to take the port
            raise RuntimeError(f"{command(port)[0]} … did not come up:\n{said[-2000:]}")


def _status(port: int, method: str, path: str, headers: Mapping[str, str] | None = None) -> int | None:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


# -- S3


@dataclass(frozen=True)
class Server:
    """Where a server is, and the options that open it."""

    scheme: str
    port: int
    options: dict[str, Any] = field(repr=False)

    def uri(self, path: str = "") -> str:
        return f"{self.scheme}://{BUCKET}/{path}"


def s3_options(port: int) -> dict[str, Any]:
    return {
        "aws_endpoint": f"http://{HOST}:{port}",
        "aws_access_key_id": "nobody",
        "aws_secret_access_key": "nothing",
        "aws_region": "us-east-1",
        "allow_http": True,
    }


@contextmanager
def moto_server() -> Iterator[Server]:
    """An S3 with one empty bucket."""
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p"]
    with _running(lambda port: [*command, str(port)], lambda port: _status(port, "GET", "/moto-api/") == 200) as port:
        assert _status(port, "PUT", f"/{BUCKET}") == 200
        yield Server("s3", port, s3_options(port))


# -- Azure

# Both are the public ones that every emulator of Azure has.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


_NPM_PATIENCE = ("--fetch-retry-mintimeout", "1000", "--fetch-retry-maxtimeout", "5000")
"""Else it waits for up to a minute before it asks again for each of many packages."""


def install_azurite() -> Path:
    """The emulator's main file; fetched by npm the first time, into a folder that git ignores."""
    home = TOOLS / "azurite" / AZURITE
    main = home / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    if not shutil.which("node"):
        raise ServerMissing("Node is not installed, and Azurite needs it")
    if main.exists():
        return main
    npm = shutil.which("npm")
    if npm is None:
        raise ServerMissing("npm is not installed, and Azurite comes from there")
    home.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{AZURITE}.part-", dir=home.parent))
    try:
        ran = subprocess.run(
            [npm, "install", "--prefix", str(part), f"azurite@{AZURITE}", "--no-audit", "--no-fund", "--loglevel", "error", *_NPM_PATIENCE],
            capture_output=True,
            text=True,
            timeout=540,
        )
        if ran.returncode != 0:
            if any(code in ran.stderr for code in _OFFLINE):
                raise ServerMissing("the network is off: npm cannot fetch Azurite")
            raise RuntimeError(f"npm could not install Azurite:\n{ran.stderr[-2000:]}")
        try:
            part.rename(home)
        except OSError:  # another run was faster
            assert main.exists()
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return main


def _signed(method: str, path: str, query: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request without a body, signed with the shared key."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    text = method + "\n" * 12 + "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    text += f"/{_ACCOUNT}{path}" + "".join(f"\n{name}:{query[name]}" for name in sorted(query))
    signature = base64.b64encode(hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()).decode()
    return {**headers, "Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": "0"}


@contextmanager
def azurite_server() -> Iterator[Server]:
    """An Azure Blob Storage with one empty container. Raises ServerMissing where there is no Node."""
    main = install_azurite()
    command = ["node", str(main), "--inMemoryPersistence", "--skipApiVersionCheck", "--loose", "--silent", "--disableTelemetry"]
    path, query = f"/{_ACCOUNT}/{BUCKET}", {"restype": "container"}

    def made(port: int) -> bool:
        status = _status(port, "PUT", f"{path}?restype=container", _signed("PUT", path, query))
        assert status in (None, 201, 409), f"the container could not be made: {status}"
        return status is not None

    with _running(lambda port: [*command, "--blobHost", HOST, "--blobPort", str(port)], made) as port:
        options = {
            "azure_storage_account_name": _ACCOUNT,
            "azure_storage_account_key": _KEY,
            "azure_endpoint": f"http://{HOST}:{port}/{_ACCOUNT}",
            "allow_http": True,
        }
        yield Server("az", port, options)


# -- a proxy that gets in the way

FAULTS = ("503", "429", "409", "reset-before", "reset-after", "late", "slow", "truncated")
"""What can happen to a request.

    503, 429        refused, nothing done
    409             a PUT is refused as if another one raced it, and nothing is there
    reset-before    the connection breaks, and the server never heard of it
    reset-after     the server did it, and the reply is lost
    late            the connection breaks, and the server gets the request a moment later all the same
    slow            the reply comes in pieces
    truncated       half of the reply comes, then the connection breaks
"""


@dataclass(frozen=True)
class Request:
    """What was asked, and what the proxy did to it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    fault: str | None


class Plan:
    """Which request meets which fault: drawn from a seed, each with ``rate``.

    ``in_a_row_max`` faults of one method and name in a row at most, so that whoever tries often
    enough gets through; None: as it comes.
    """

    def __init__(
        self, seed: int = 0, rate: float = 0.0, faults: tuple[str, ...] = FAULTS, *, methods: str = "", in_a_row_max: int | None = None
    ) -> None:
        self._random, self._rate, self._faults = random.Random(seed), rate, faults
        self._methods, self._in_a_row_max = methods.split(), in_a_row_max
        self._in_a_row: Counter[tuple[str, str]] = Counter()

    def draw(self, method: str, path: str) -> str | None:
        if (self._methods and method not in self._methods) or self._random.random() >= self._rate:
            fault = None
        else:
            fault = self._random.choice([fault for fault in self._faults if fault != "409" or method == "PUT"] or [None])
        if fault is not None and self._in_a_row[method, path] == self._in_a_row_max:
            fault = None
        self._in_a_row[method, path] = self._in_a_row[method, path] + 1 if fault else 0
        return fault


class Proxy:
    """Stands before an S3 server on loopback, passes requests on one PUT at a time, and hurts them as planned."""

    _PIECES, _PIECE_SECONDS, _LATE_SECONDS = 4, 0.01, 0.03
    _LATE_MAX = 64

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._lock, self._puts = threading.Lock(), threading.Lock()
        self._plan = Plan()
        self._late: list[threading.Thread] = []
        self.requests: list[Request] = []
        self.counts: Counter[str] = Counter()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Listener((HOST, 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.port = int(self._server.server_address[1])
        self.server = Server("s3", self.port, {**s3_options(self.port), "timeout": "10s"})

    def hurt(self, plan: Plan) -> None:
        """From now on, this plan."""
        with self._lock:
            self._plan = plan
            self.requests.clear()

    def calm(self) -> None:
        """No more faults; what was under way late has arrived when this returns."""
        self.hurt(Plan())
        for thread in list(self._late):
            thread.join(10)
        self._late.clear()

    def close(self) -> None:
        self.calm()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def take(self, method: str, path: str, headers: dict[str, str]) -> str | None:
        with self._lock:
            parts = urlsplit(path)
            fault = self._plan.draw(method, parts.path)
            if fault == "late" and len([thread for thread in self._late if thread.is_alive()]) >= self._LATE_MAX:
                fault = "reset-before"
            self.requests.append(Request(method, unquote(parts.path), parts.query, headers, fault))
            self.counts[fault or "passed"] += 1
            return fault

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(HOST, self._upstream, timeout=30)
        try:
            if method == "PUT":
                with self._puts:
                    return self._ask(connection, method, path, headers, body)
            return self._ask(connection, method, path, headers, body)
        finally:
            connection.close()

    @staticmethod
    def _ask(
        connection: http.client.HTTPConnection, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        reply = connection.getresponse()
        return reply.status, reply.getheaders(), reply.read()

    def forward_late(self, *request: Any) -> None:
        def run() -> None:
            time.sleep(self._LATE_SECONDS)
            with suppress(OSError):  # the server is gone: never arrived
                self.forward(*request)

        thread = threading.Thread(target=run, daemon=True)
        with self._lock:
            self._late.append(thread)
        thread.start()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # a client that went away is none of our business


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    proxy: Proxy

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "transfer-encoding")}
        headers["Connection"] = "close"
        request = (self.command, self.path, headers, body)
        fault = self.proxy.take(self.command, self.path, {name.lower(): value for name, value in headers.items()})
        if fault in ("503", "429", "409"):
            code = {"503": "SlowDown", "429": "TooManyRequests", "409": "ConditionalRequestConflict"}[fault]
            self._answer(int(fault), [], f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode())
        elif fault in ("reset-before", "late"):
            if fault == "late":
                self.proxy.forward_late(*request)
            self._reset()
        elif fault == "reset-after":
            self.proxy.forward(*request)
            self._reset()
        else:
            self._answer(*self.proxy.forward(*request), how=fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, how: str | None = None) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if self.command == "HEAD" and name.lower() == "content-length":
                length = value
            elif name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        head = b"".join(self._headers_buffer) + b"\r\n"
        self._headers_buffer = []
        reply = head + (b"" if self.command == "HEAD" else body)
        if how == "truncated":
            # Half of the body; where there is none, half of the head.
            keep = len(head) + len(body) // 2 if len(body) > 1 and self.command != "HEAD" else len(head) // 2
            self.wfile.write(reply[:keep])
            self.wfile.flush()
            self.close_connection = True
            return
        if how == "slow":
            size = len(reply) // self.proxy._PIECES + 1
            for start in range(0, len(reply), size):
                self.wfile.write(reply[start : start + size])
                self.wfile.flush()
                time.sleep(self.proxy._PIECE_SECONDS)
            return
        self.wfile.write(reply)

    def _reset(self) -> None:
        """Break the connection with a RST, at once."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())


@contextmanager
def fault_proxy(server: Server) -> Iterator[Proxy]:
    """A proxy before an S3 server; calm at first."""
    proxy = Proxy(server.port)
    try:
        yield proxy
    finally:
        proxy.close()
