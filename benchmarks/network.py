"""A store behind a network: a real S3 server behind a proxy that adds a delay to each request, for us and for Lance alike.

    python benchmarks/network.py [--quick] [--rounds N] [--only NAME …] [--out FILE]

The server is moto's, a process of its own; the proxy is another one, on loopback, and counts the requests.
Both clients see the same network. Bytes are those of the rows.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import headgate as hg
import peers
from harness import Contestant, Measurements, NotHere, Question, Scale, Target, main, percentile
from rows import KEY, SCHEMA, data_bytes, rows

OURS, LANCE = "headgate", "lance"
_TESTS = Path(__file__).parent.parent / "tests"
_ROWS_PER_PUT = 1000
_SHARDS, _RUNS, _ROWS_PER_RUN = 8, 4, 2000


class _Handler(BaseHTTPRequestHandler):
    """Passes a request on, late."""

    protocol_version = "HTTP/1.1"
    upstream: ClassVar[int] = 0
    seconds: ClassVar[float] = 0.0
    counts: ClassVar[Counter[str]] = Counter()
    local: ClassVar[threading.local] = threading.local()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/-/counts":
            self._answer(200, {}, json.dumps(self.counts).encode())
            return
        if self.path.startswith("/-/delay/"):
            type(self).seconds = float(self.path.rsplit("/", 1)[1])
            self.counts.clear()
            self._answer(200, {}, b"")
            return
        self.counts[self.command] += 1
        self.counts["bytes in"] += len(body)
        time.sleep(self.seconds)
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            reply = connection.getresponse()
            self._answer(reply.status, dict(reply.getheaders()), reply.read())
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = headers.get("Content-Length", headers.get("content-length")) if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815  # the names that the server looks for

    def log_message(self, *args: Any) -> None:
        pass


def _serve(upstream: int, sender: Any) -> None:
    _Handler.upstream = upstream
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    sender.send(server.server_address[1])
    server.serve_forever()


class Network:
    """The proxy, as the clients see it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.options = {
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "aws_region": "us-east-1",
            "aws_endpoint": f"http://127.0.0.1:{port}",
            "aws_allow_http": "true",
        }

    def _ask(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def delay(self, seconds: float) -> None:
        """From now on, and count from here."""
        self._ask(f"/-/delay/{seconds}")

    def counts(self) -> Counter[str]:
        return Counter(json.loads(self._ask("/-/counts")))


@contextmanager
def network() -> Iterator[Network]:
    """A server and the proxy before it."""
    sys.path.insert(0, str(_TESTS))
    try:
        from servers import moto_server  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotHere(f"the S3 server of the tests is not here: {error}") from None
    with moto_server() as server:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        proxy = context.Process(target=_serve, args=(server.port, sender), daemon=True)
        proxy.start()
        try:
            yield Network(receiver.recv())
        finally:
            proxy.kill()
            proxy.join()


def saturated(milliseconds: float) -> Contestant:
    """One client with a queue that is never empty."""

    def measure(place: Path, scale: Scale) -> Measurements:
        with network() as net:
            table = hg.create_table(f"s3://bucket/{place.name}", SCHEMA, KEY, storage_options=net.options)
            batch = rows(_ROWS_PER_PUT)
            config = hg.ShardWriterConfig(enable_memtable=False, max_inflight=8, max_wal_buffer_size=1 << 20)
            with table.shard("0000").writer(config) as writer:
                net.delay(milliseconds / 1e3)
                count = scale.of(1200)
                start = time.perf_counter()
                acks = [writer.put(batch) for _ in range(count)]
                for ack in acks:
                    ack.wait()
                seconds = time.perf_counter() - start
                requests = sum(n for what, n in net.counts().items() if what != "bytes in")
                net.delay(0)
            return {"MB/s": count * data_bytes(batch) / seconds / 1e6, "requests/M rows": requests / (count * _ROWS_PER_PUT) * 1e6}

    return measure


def saturated_lance(milliseconds: float) -> Contestant:
    def measure(place: Path, scale: Scale) -> Measurements:
        with network() as net:
            writer = _lance(net, place, durable_write=False, max_wal_flush_interval_ms=10)
            table = peers.lance_rows(_ROWS_PER_PUT)
            net.delay(milliseconds / 1e3)
            count = scale.of(1200)
            start = time.perf_counter()
            for _ in range(count):
                writer.put(table)
            writer.close()  # all durable
            seconds = time.perf_counter() - start
            requests = sum(n for what, n in net.counts().items() if what != "bytes in")
            net.delay(0)
            return {"MB/s": count * table.nbytes / seconds / 1e6, "requests/M rows": requests / (count * _ROWS_PER_PUT) * 1e6}

    return measure


def _lance(net: Network, place: Path, **options: Any) -> Any:
    try:
        import lance
    except ImportError:
        raise NotHere("pylance is not installed") from None
    try:
        dataset = lance.write_dataset(peers.lance_rows(1), f"s3://bucket/{place.name}.lance", storage_options=net.options)
        dataset.initialize_mem_wal(maintained_indexes=[])
        return peers.lance_shard(dataset, **options)
    except OSError as error:
        raise NotHere(f"Lance cannot use this server: {str(error).splitlines()[0][:200]}") from None


def one_client(milliseconds: float, lance: bool) -> Contestant:
    """A durable put of ten rows, one after another: latency, and requests at it."""

    def measure(place: Path, scale: Scale) -> Measurements:
        with network() as net:
            count, taken = scale.of(60), []
            if lance:
                writer, table = _lance(net, place, durable_write=True, max_wal_flush_interval_ms=1), peers.lance_rows(10)
                put: Any = lambda: writer.put(table)  # noqa: E731
            else:
                made = hg.create_table(f"s3://bucket/{place.name}", SCHEMA, KEY, storage_options=net.options)
                writer, batch = made.shard("0000").writer(hg.ShardWriterConfig(enable_memtable=False)), rows(10)
                put = lambda: writer.put(batch).wait()  # noqa: E731
            put()
            net.delay(milliseconds / 1e3)
            for _ in range(count):
                start = time.perf_counter()
                put()
                taken.append((time.perf_counter() - start) * 1e3)
            requests = sum(n for what, n in net.counts().items() if what != "bytes in")
            net.delay(0)
            writer.close()
            return {"p50 ms": percentile(taken, 0.5), "p99 ms": percentile(taken, 0.99), "requests/M rows": requests / (count * 10) * 1e6}

    return measure


def clients(milliseconds: float, threads: int, lance: bool) -> Contestant:
    """Threads that put ten rows each, durable, again and again."""

    def measure(place: Path, scale: Scale) -> Measurements:
        with network() as net:
            taken: list[float] = []
            if lance:
                writer = _lance(net, place, durable_write=True, max_wal_flush_interval_ms=1)
                tables = [peers.lance_rows(10, 10 * number) for number in range(threads)]
                put: Any = lambda number: writer.put(tables[number])  # noqa: E731
            else:
                made = hg.create_table(f"s3://bucket/{place.name}", SCHEMA, KEY, storage_options=net.options)
                writer = made.shard("0000").writer(hg.ShardWriterConfig(enable_memtable=False))
                batches = [rows(10, 10 * number) for number in range(threads)]
                put = lambda number: writer.put(batches[number]).wait()  # noqa: E731
            net.delay(milliseconds / 1e3)

            def timed(number: int) -> None:
                start = time.perf_counter()
                put(number)
                taken.append((time.perf_counter() - start) * 1e3)

            rate = peers.in_threads(threads, scale.seconds(4.0), timed)
            requests = sum(n for what, n in net.counts().items() if what != "bytes in")
            net.delay(0)
            writer.close()
            return {"puts/s": rate, "p50 ms": percentile(taken, 0.5), "requests/M rows": requests / (len(taken) * 10) * 1e6}

    return measure


def merged_scan(milliseconds: float, lance: bool) -> Contestant:
    """All rows: by one who has just opened the table, and by one who has read it before. Lance has the same rows as one dataset."""

    def measure(place: Path, scale: Scale) -> Measurements:
        with network() as net:
            each, uri = scale.of(_ROWS_PER_RUN), f"s3://bucket/{place.name}"
            if lance:
                read = _lance_reader(net, f"{uri}.lance", peers.lance_rows(each * (_RUNS + 1) // 2))
            else:
                rule = hg.bucket(KEY, _SHARDS)
                table = hg.create_table(uri, SCHEMA, KEY, sharding=rule, storage_options=net.options)
                with table.writer() as writer:
                    for number in range(_RUNS):  # half of the rows are newer versions of what is there
                        writer.put(rows(each, number * each // 2)).wait()
                        writer.flush()
                read = lambda: (opened := hg.open_table(uri, net.options), lambda: opened.scan().to_arrow())[1]  # noqa: E731
            first, warm = [], []
            net.delay(milliseconds / 1e3)
            for _ in range(3):
                start = time.perf_counter()
                scan = read()
                assert scan().num_rows == each * (_RUNS + 1) // 2
                first.append((time.perf_counter() - start) * 1e3)
            requests = sum(n for what, n in net.counts().items() if what != "bytes in") / len(first)
            for _ in range(scale.of(5)):
                start = time.perf_counter()
                scan()
                warm.append((time.perf_counter() - start) * 1e3)
            net.delay(0)
            return {"first ms": percentile(first, 0.5), "warm ms": percentile(warm, 0.5), "requests": requests}

    return measure


def _lance_reader(net: Network, uri: str, table: Any) -> Any:
    try:
        import lance
    except ImportError:
        raise NotHere("pylance is not installed") from None
    lance.write_dataset(table, uri, storage_options=net.options)
    return lambda: lance.dataset(uri, storage_options=net.options).to_table


QUESTIONS = [
    Question(
        "clients-20",
        "16 threads, durable puts of ten rows, 20 ms a request",
        {OURS: clients(20, 16, lance=False), LANCE: clients(20, 16, lance=True)},
        [
            Target("p50 over Lance's", f"{OURS}.p50 ms", f"{LANCE}.p50 ms", at_most=1),
            Target("requests per million rows over Lance's", f"{OURS}.requests/M rows", f"{LANCE}.requests/M rows", at_most=0.5),
        ],
        max_rounds=3,
    ),
    Question(
        "saturated-20",
        "One client, a full queue of 1,000-row puts, 20 ms a request",
        {OURS: saturated(20), LANCE: saturated_lance(20)},
        [
            Target("MB/s over Lance", f"{OURS}.MB/s", f"{LANCE}.MB/s", at_least=5),
            Target("requests per million rows over Lance's", f"{OURS}.requests/M rows", f"{LANCE}.requests/M rows"),
        ],
        notes=["Lance: puts that do not wait, a tick of 10 ms, close() at the end. Ours: max_inflight=8, entries of up to 1 MiB."],
        max_rounds=3,
    ),
    Question(
        "scan-20",
        "All rows of 8 shards with 4 small runs each, half of them replaced, 20 ms a request",
        {OURS: merged_scan(20, lance=False), LANCE: merged_scan(20, lance=True)},
        [
            Target("the first scan over Lance's", f"{OURS}.first ms", f"{LANCE}.first ms"),
            Target("the next one over Lance's", f"{OURS}.warm ms", f"{LANCE}.warm ms"),
        ],
        notes=[
            "Lance: the rows that count, as one dataset without shards or runs. "
            "The server is one process that takes some milliseconds for each request."
        ],
        max_rounds=3,
    ),
    *(
        Question(
            f"one-client-{milliseconds}",
            f"One client, one durable put of ten rows after another, {milliseconds} ms a request",
            {OURS: one_client(milliseconds, lance=False), LANCE: one_client(milliseconds, lance=True)},
            [Target("p50 over Lance's", f"{OURS}.p50 ms", f"{LANCE}.p50 ms")],
            max_rounds=2,
        )
        for milliseconds in (5, 20, 100)
    ),
]

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.exit(main(QUESTIONS, default_out=here / "results" / "network.json", packages=["headgate", "pylance", "obstore", "moto"]))
