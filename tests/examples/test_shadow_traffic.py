"""Traffic goes to one server, a copy of it to another; what that one does, no client notices."""

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "shadow_traffic.py"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shadow_traffic", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@dataclass
class Backend:
    """A server with an OpenAI face that says what the test has it say."""

    text: str = "Paris is it"
    status: int = 200
    before_word: Callable[[int], None] = lambda _: None
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    base: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else None
        self.requests.append((handler.path, dict(handler.headers.items()), body))
        if body is not None and body.get("stream") and self.status == 200:
            self._stream(handler)
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": self.text}}
        answer = {"choices": [choice]} if self.status == 200 else {"error": {"message": "no"}}
        data = json.dumps(answer).encode()
        handler.send_response(self.status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _stream(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for number, word in enumerate(self.text.split(" ")):
            self.before_word(number)
            part = {"choices": [{"index": 0, "delta": {"content": f"{word} "}}]}
            handler.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
        handler.wfile.write(b"data: [DONE]\n\n")


class Quiet(ThreadingHTTPServer):
    """A backend whose peer may go."""

    def handle_error(self, *_: object) -> None:
        assert isinstance(sys.exception(), ConnectionError)


@contextlib.contextmanager
def serving(backend: Backend) -> Iterator[Backend]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            backend.answer(self)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with Quiet(("127.0.0.1", 0), Handler) as server, running(server):
        backend.base = f"http://127.0.0.1:{server.server_address[1]}"
        yield backend


@contextlib.contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@dataclass
class Setup:
    """The script between two backends, and what it reports."""

    primary: Backend
    shadow: Backend
    port: int
    lines: list[dict[str, Any]]
    reported: threading.Semaphore
    copies: Any

    def ask(self, body: dict[str, Any], path: str = CHAT, **headers: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()

    def line(self) -> dict[str, Any]:
        """The next pair that was compared."""
        assert self.reported.acquire(timeout=WAIT_S)
        return self.lines.pop(0)


@pytest.fixture
def between(
    script: ModuleType,
) -> Iterator[Callable[..., contextlib.AbstractContextManager[Setup]]]:
    @contextlib.contextmanager
    def make(
        primary: Backend, shadow: Backend, *, model: str | None = None, threads: int = 4
    ) -> Iterator[Setup]:
        lines: list[dict[str, Any]] = []
        reported = threading.Semaphore(0)

        def report(line: dict[str, Any]) -> None:
            lines.append(line)
            reported.release()

        with serving(primary), serving(shadow):
            copies = script.Shadow(
                base=shadow.base,
                model=model,
                share=1.0,
                timeout_s=WAIT_S,
                report=report,
                threads=threads,
            )
            with contextlib.closing(copies):
                server = script.make_server(("127.0.0.1", 0), primary.base, copies, WAIT_S)
                with server, running(server):
                    port = server.server_address[1]
                    yield Setup(primary, shadow, port, lines, reported, copies)

    return make


HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_equal_answers_are_told_equal(between: Any, stream: bool) -> None:
    with between(Backend(), Backend()) as setup:
        status, body = setup.ask({**HELLO, "stream": stream})
        line = setup.line()
    assert status == 200
    assert b"Paris" in body
    assert (b"[DONE]" in body) is stream
    assert (line["path"], line["status"], line["error"]) == (CHAT, [200, 200], ["", ""])
    assert line["same_text"]
    assert line["characters"][0] == line["characters"][1] == line["same_characters"] > 0
    assert all(seconds > 0 for seconds in line["total_s"])
    for first, total in zip(line["first_s"], line["total_s"], strict=True):
        assert (first is not None) is stream
        assert first is None or 0 < first <= total


@pytest.mark.parametrize("stream", [False, True])
def test_other_answers_are_told_apart_without_their_text(between: Any, stream: bool) -> None:
    with between(Backend("Paris is it"), Backend("Paris was it")) as setup:
        setup.ask({**HELLO, "stream": stream})
        line = setup.line()
    assert not line["same_text"]
    assert line["same_characters"] == len("Paris ")
    assert "Paris" not in json.dumps(line)


def test_a_stream_passes_while_the_shadow_hangs(between: Any) -> None:
    """Each word leaves the primary only when the client has had the one before."""
    had, hang = threading.Semaphore(1), threading.Event()

    def when_had(_: int) -> None:
        assert had.acquire(timeout=WAIT_S)

    def when_let(_: int) -> None:
        assert hang.wait(WAIT_S)

    with between(Backend(before_word=when_had), Backend(before_word=when_let)) as setup:
        connection = HTTPConnection("127.0.0.1", setup.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("POST", CHAT, json.dumps({**HELLO, "stream": True}))
            with connection.getresponse() as response:
                for word in ("Paris ", "is ", "it "):
                    assert word in response.readline().decode()
                    assert response.readline() == b"\n"
                    had.release()
                assert response.read() == b"data: [DONE]\n\n"
        assert setup.lines == []
        hang.set()
        assert setup.line()["same_text"]


def test_what_the_shadow_does_wrong_no_client_sees(between: Any) -> None:
    with between(Backend(), Backend(status=503)) as setup:
        assert setup.ask(HELLO)[0] == 200
        assert setup.line()["status"] == [200, 503]
        setup.shadow.status = 200
        setup.copies.base = "http://127.0.0.1:1"
        assert setup.ask(HELLO)[0] == 200
        line = setup.line()
    assert (line["status"], line["error"]) == ([200, 0], ["", "ConnectionRefusedError"])


def test_an_error_of_the_primary_is_passed_on(between: Any, script: ModuleType) -> None:
    with between(Backend(status=400), Backend()) as setup:
        status, body = setup.ask(HELLO)
        assert (status, json.loads(body)) == (400, {"error": {"message": "no"}})
        assert setup.line()["status"] == [400, 200]


def test_an_answer_cut_by_the_primary_is_cut_for_the_client(between: Any) -> None:
    class Cutting(Backend):
        def answer(self, handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b"{")

    with between(Cutting(), Backend()) as setup:
        with pytest.raises(IncompleteRead):
            setup.ask(HELLO)
        assert setup.line()["error"] == ["IncompleteRead", ""]


def test_the_copy_has_its_own_model_and_no_secret(between: Any) -> None:
    with between(Backend(), Backend(), model="other") as setup:
        setup.ask(HELLO, Authorization="Bearer secret", **{"X-Request-Id": "7"})
        setup.line()
    ((_, seen, body),) = setup.primary.requests
    assert (seen["Authorization"], body) == ("Bearer secret", HELLO)
    ((_, seen, body),) = setup.shadow.requests
    assert "Authorization" not in seen
    assert seen["X-Request-Id"] == "7"
    assert body == {**HELLO, "model": "other"}


def test_other_paths_go_to_the_primary_alone(between: Any) -> None:
    with between(Backend(), Backend()) as setup:
        connection = HTTPConnection("127.0.0.1", setup.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/v1/models")
            assert connection.getresponse().status == 200
        assert setup.ask({"input": "a"}, "/v1/embeddings")[0] == 200
        assert setup.ask({"prompt": "a"}, COMPLETIONS)[0] == 200
        assert setup.line()["path"] == COMPLETIONS
    assert [path for path, *_ in setup.shadow.requests] == [COMPLETIONS]


def test_a_client_that_goes_ends_its_request(
    between: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    many = "word " * 200_000  # more than the sockets on the way hold
    with between(Backend(many), Backend()) as setup:
        connection = HTTPConnection("127.0.0.1", setup.port, timeout=WAIT_S)
        connection.request("POST", CHAT, json.dumps({**HELLO, "stream": True}))
        assert b"word" in connection.getresponse().readline()
        connection.close()
        line = setup.line()
    assert line["error"][0] in ("BrokenPipeError", "ConnectionResetError")
    assert line["error"][1] == ""
    assert "Traceback" not in capfd.readouterr().err


def test_copies_beyond_the_bound_are_left_out(between: Any) -> None:
    hang = threading.Event()
    stuck = Backend(before_word=lambda _: hang.wait(WAIT_S))
    with between(Backend(), stuck, threads=1) as setup:
        for _ in range(5):  # one under way, or about to be, one that waits
            assert setup.ask({**HELLO, "stream": True})[0] == 200
        assert setup.copies.left_out >= 3
        hang.set()
        assert setup.line()["same_text"]


def test_from_the_command_line() -> None:
    with serving(Backend()) as primary, serving(Backend("Paris")) as shadow:
        command = [sys.executable, SCRIPT, "--primary", primary.base, "--shadow", shadow.base]
        with subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                port = int(process.stderr.readline().split()[-1])
                connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
                with contextlib.closing(connection):
                    connection.request("POST", CHAT, json.dumps(HELLO))
                    assert b"Paris is it" in connection.getresponse().read()
                line = json.loads(process.stdout.readline())
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=WAIT_S)
            finally:
                process.kill()
    assert line["status"] == [200, 200]
    assert process.returncode == 0
    assert said.splitlines()[:2] == [
        "1 compared, 0 cut, 0 left out",
        "same status: 1, same text: 0",
    ]
    assert said.splitlines()[2].startswith("median total_s: primary ")
