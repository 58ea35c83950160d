"""Sends a copy of OpenAI-style requests to a second server, and compares the answers.

    python examples/shadow_traffic.py --primary http://127.0.0.1:8000 --shadow http://127.0.0.1:30000

Clients talk to this instead of the primary server. They get the primary's answer, piece by piece as
it comes; the copy goes its own way meanwhile, and what becomes of it never reaches them. One JSON
object per compared pair goes to standard output: statuses, whether the texts are equal, seconds to
the first text and to the end. No prompt and no answer is written anywhere.

Standard library only. Owns nothing of either server; knows OpenAI's paths and where their answers
have text.
"""

import argparse
import contextlib
import json
import queue
import random
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COPIED = ("/v1/chat/completions", "/v1/completions")
"""Paths whose requests are copied; all others go to the primary alone."""

_MOST_BODY = 16 * 2**20
_MOST_TEXT = 2**20
_MOST_SUMMED_UP = 10_000
_NOT_RELAYED = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te"}
_SECRET = {"authorization", "cookie", "api-key", "x-api-key"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request.

    Attributes:
        status: of HTTP; 0 where there was no answer.
        texts: of all choices, in their order; long ones are cut.
        first_s: seconds to the first text of a stream; None for one that is no stream.
        total_s: seconds to the end.
        error: why it did not come to its end; "" where it did.
    """

    status: int = 0
    texts: tuple[str, ...] = ()
    first_s: float | None = None
    total_s: float = 0.0
    error: str = ""


class Reader:
    """Takes the body of an answer as it comes, and finds the text in it."""

    def __init__(self, is_stream: bool) -> None:
        self.first_at: float | None = None
        self._is_stream = is_stream
        self._rest = b""
        self._texts: dict[int, str] = {}

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes, wherever they were cut."""
        self._rest += piece
        if self._is_stream:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._take(line[5:])
        if len(self._rest) > _MOST_BODY:
            self._rest = b""  # then nothing is read of it

    def texts(self) -> tuple[str, ...]:
        """Of all choices."""
        if not self._is_stream:
            self._take(self._rest)
        return tuple(text for _, text in sorted(self._texts.items()))

    def _take(self, raw: bytes) -> None:
        try:
            choices = json.loads(raw).get("choices") or ()
            for choice in choices:
                message = choice.get("delta") or choice.get("message") or {}
                text = choice.get("text") or message.get("content") or ""
                index = choice.get("index", 0)
                self._texts[index] = (self._texts.get(index, "") + text)[:_MOST_TEXT]
                if text and self._is_stream and self.first_at is None:
                    self.first_at = time.monotonic()
        except (ValueError, AttributeError, TypeError):
            return  # the end of a stream, an error page, nothing we know: there is no text in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the client sent it."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def copied(self, model: str | None) -> "Request":
        """The one for the shadow: without the client's secrets, for `model` if that is given."""
        headers = tuple(pair for pair in self.headers if pair[0].lower() not in _SECRET)
        body = self.body
        if model is not None:
            with contextlib.suppress(ValueError, TypeError):  # then the server says what is wrong
                body = json.dumps({**json.loads(body), "model": model}).encode()
        return Request(method=self.method, path=self.path, headers=headers, body=body)


def ask(
    base: str,
    request: Request,
    *,
    timeout_s: float,
    head: Callable[[HTTPResponse], None] = lambda _: None,
    piece: Callable[[bytes], None] = lambda _: None,
) -> Answer:
    """Sends a request and reads its answer to the end; no failure of the server raises.

    Args:
        base: address of the server, `http://HOST:PORT`, with a path before `/v1` if it has one.
        request: what to send.
        timeout_s: longest wait for the next bytes, seconds.
        head: called with the head of the answer, before any `piece`.
        piece: called with the body, as it comes. What the two raise ends the call.
    """
    parts = urlsplit(base)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    started, status, reader = time.monotonic(), 0, Reader(is_stream=False)
    connection = kind(parts.netloc, timeout=timeout_s)
    error = ""
    try:
        headers = {key: value for key, value in request.headers if _is_relayed(key)}
        headers["Accept-Encoding"] = "identity"  # the text is read on its way
        path = parts.path.rstrip("/") + request.path
        connection.request(request.method, path, request.body or None, headers)
        with connection.getresponse() as response:
            status = response.status
            reader = Reader("event-stream" in response.headers.get("Content-Type", ""))
            head(response)
            while data := response.read1(65536):
                piece(data)
                reader.feed(data)
            if response.length:  # read1 takes an early end for the end
                raise IncompleteRead(b"", response.length)
    except (OSError, HTTPException) as failed:
        error = type(failed).__name__
    finally:
        connection.close()
    first = None if reader.first_at is None else reader.first_at - started
    total = time.monotonic() - started
    return Answer(status=status, texts=reader.texts(), first_s=first, total_s=total, error=error)


def _is_relayed(header: str) -> bool:
    return header.lower() not in _NOT_RELAYED | {"accept-encoding"}


def compared(path: str, primary: Answer, shadow: Answer) -> dict[str, Any]:
    """One line of the report."""
    return {
        "path": path,
        "status": [primary.status, shadow.status],
        "error": [primary.error, shadow.error],
        "same_text": primary.texts == shadow.texts,
        "same_characters": sum(map(_common, primary.texts, shadow.texts)),
        "characters": [sum(map(len, answer.texts)) for answer in (primary, shadow)],
        "first_s": [_rounded(primary.first_s), _rounded(shadow.first_s)],
        "total_s": [_rounded(primary.total_s), _rounded(shadow.total_s)],
    }


def _common(one: str, other: str) -> int:
    """Length of the equal beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


@dataclass(slots=True, kw_only=True)
class Shadow:
    """Sends copies from threads of its own, and reports.

    Attributes:
        base: address of the second server.
        model: name of the model there; None: as the client calls it.
        share: of the requests that are copied, 0 to 1.
        timeout_s: longest wait for the next bytes of either server.
        report: takes each compared pair.
        threads: most copies under way; beyond them as many wait, and more are left out.
    """

    base: str
    model: str | None
    share: float
    timeout_s: float
    report: Callable[[dict[str, Any]], None]
    threads: int
    left_out: int = 0
    _jobs: queue.Queue[tuple[Request, Future[Answer]] | None] = field(init=False)
    _running: list[threading.Thread] = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._jobs = queue.Queue(self.threads)
        self._running = [threading.Thread(target=self._run) for _ in range(self.threads)]
        for thread in self._running:
            thread.start()

    def copy(self, request: Request, primary: Future[Answer]) -> None:
        """Takes a request whose own answer `primary` will have. Never waits."""
        if urlsplit(request.path).path not in COPIED or random.random() >= self.share:
            return
        try:
            self._jobs.put_nowait((request, primary))
        except queue.Full:
            with self._lock:
                self.left_out += 1

    def close(self) -> None:
        """Finishes the copies under way."""
        for _ in self._running:
            self._jobs.put(None)
        for thread in self._running:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            request, primary = job
            mine = ask(self.base, request.copied(self.model), timeout_s=self.timeout_s)
            self.report(compared(request.path, primary.result(), mine))


class Server(ThreadingHTTPServer):
    """Takes no notice of clients that go away."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tells of our own faults alone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def make_server(
    address: tuple[str, int], primary: str, shadow: Shadow, timeout_s: float
) -> ThreadingHTTPServer:
    """The server that clients talk to."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self._relay()

        def do_GET(self) -> None:
            self._relay()

        def _relay(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            if size > _MOST_BODY or "Transfer-Encoding" in self.headers:
                self.send_error(413, f"bodies need a Content-Length of at most {_MOST_BODY}")
                self.close_connection = True
                return
            request = Request(
                method=self.command,
                path=self.path,
                headers=tuple(self.headers.items()),
                body=self.rfile.read(size),
            )
            answer: Future[Answer] = Future()
            shadow.copy(request, answer)
            result = Answer(error="not asked")
            try:
                result = ask(
                    primary, request, timeout_s=timeout_s, head=self._head, piece=self._piece
                )
            finally:
                answer.set_result(result)
            if not result.error:
                self.wfile.write(b"0\r\n\r\n")
                return
            self.close_connection = True  # so that the client, too, sees that it was cut
            if not result.status:
                self.send_error(502, "the primary server does not answer")

        def _head(self, response: HTTPResponse) -> None:
            self.send_response(response.status)
            for key, value in response.headers.items():
                if key.lower() not in _NOT_RELAYED | {"date", "server"}:
                    self.send_header(key, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()

        def _piece(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: paths may hold what should not be in a log."""

    return Server(address, Handler)


def summary(lines: Collection[dict[str, Any]], left_out: int) -> str:
    """All pairs in some lines of text; times and texts are of those that came to their end."""
    whole = [line for line in lines if line["error"] == ["", ""]]
    said = [f"{len(lines)} compared, {len(lines) - len(whole)} cut, {left_out} left out"]
    same_status = sum(line["status"][0] == line["status"][1] for line in whole)
    same_text = sum(line["same_text"] for line in whole)
    said.append(f"same status: {same_status}, same text: {same_text}")
    for name in ("first_s", "total_s"):
        pairs = [line[name] for line in whole if None not in line[name]]
        if pairs:
            primary, shadow = (statistics.median(times) for times in zip(*pairs, strict=True))
            said.append(f"median {name}: primary {primary:.3f}, shadow {shadow:.3f}")
    return "\n".join(said)


@contextlib.contextmanager
def shadowing(arguments: argparse.Namespace) -> Iterator[ThreadingHTTPServer]:
    """The whole of it, ready to serve; prints pairs, and at the end a summary of the last ones."""
    lines: deque[dict[str, Any]] = deque(maxlen=_MOST_SUMMED_UP)
    lock = threading.Lock()

    def report(line: dict[str, Any]) -> None:
        with lock:
            lines.append(line)
            print(json.dumps(line), flush=True)

    shadow = Shadow(
        base=arguments.shadow,
        model=arguments.shadow_model,
        share=arguments.share,
        timeout_s=arguments.timeout,
        report=report,
        threads=arguments.copies,
    )
    host, _, port = arguments.listen.rpartition(":")
    try:
        with make_server((host, int(port)), arguments.primary, shadow, arguments.timeout) as server:
            yield server
    finally:
        shadow.close()
        print(summary(lines, shadow.left_out), file=sys.stderr)


def main(arguments: Sequence[str]) -> None:
    """Serves until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Copies OpenAI requests to a second server.")
    parser.add_argument("--primary", required=True, help="whose answers clients get, http://HOST")
    parser.add_argument("--shadow", required=True, help="who gets the copies, http://HOST")
    parser.add_argument("--shadow-model", help="name of the model there, if it is another")
    parser.add_argument("--listen", default="127.0.0.1:8080", help="for clients (%(default)s)")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests (%(default)s)")
    parser.add_argument("--copies", type=int, default=32, help="most at a time (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds (%(default)s)")
    with shadowing(parser.parse_args(arguments)) as server:
        print(f"listening on port {server.server_address[1]}", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
