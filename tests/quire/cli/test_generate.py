"""`quire generate`, `quire chat` and `quire health`, as a person uses them."""

import asyncio
import contextlib
import io
import json
import os
import pty
import signal
import sys
from typing import Any

import pytest

from quire.cli.main import guarded
from quire.errors import AnswerCut
from quire.v1 import generation_pb2
from tests.fakes.otlp_receiver import dead_url, receiving
from tests.fakes.text_service import FakeTextService, failure, serving, words
from tests.quire.cli.running_quire import environment, full_disk, quire, started

ANSWER = "".join(words(5))


async def test_the_text_and_nothing_else() -> None:
    service = FakeTextService()
    async with serving(service) as target:
        result = await quire(
            *("generate", "--prompt", "Hi", "--target", target, "--temperature", "0"),
            *("--top-p", "0.5", "--top-k", "3", "--seed", "7", "--max-tokens", "9"),
            *("--stop", "A", "--stop", "B", "--ignore-eos", "--stop-token-id", "0"),
            *("--stop-token-id", "9", "--include-stop", "--show-special-tokens"),
        )
    assert (result.code, result.out, result.err) == (0, f"{ANSWER}\n", "")
    (request,) = service.requests
    assert request.text == "Hi"
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 3)
    assert (sampling.seed, request.stopping.max_tokens) == (7, 9)
    assert (list(request.stop_strings), request.stopping.ignore_eos) == (["A", "B"], True)
    assert list(request.stopping.stop_token_ids) == [0, 9]
    output = request.output
    assert (output.include_stop_str_in_output, output.skip_special_tokens) == (True, False)


async def test_wrong_flags_are_all_named() -> None:
    result = await quire("chat", "--top-p", "2", "--stop-token-id", "-1", "x")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "quire: top_p: must be in (0, 1], got 2.0; "
        "stop_token_ids: must be from 0 to 2**32 - 1 each, got -1\n"
    )


@pytest.mark.parametrize("command", [("generate", "--prompt", "Hi"), ("chat", "Hi")])
async def test_scheduling_travels(command: tuple[str, ...]) -> None:
    service = FakeTextService()
    async with serving(service) as target:
        result = await quire(
            *(*command, "--target", target, "--priority-class", "batch", "--tenant", "acme"),
            *("--ttft-target", "250", "--tpot-target", "40", "--shed-late", "--session-id", "s"),
            *("--cache-salt", "", "--no-prefix-cache-read"),
        )
        assert (result.code, result.out, result.err) == (0, f"{ANSWER}\n", "")
        assert (await quire(*command, "--target", target)).code == 0
    given, plain = service.requests
    assert given.scheduling == generation_pb2.SchedulingOptions(
        priority_class="batch",
        tenant="acme",
        ttft_target_ms=250,
        tpot_target_ms=40,
        shed_late=True,
        session_id="s",
        cache_salt="",
        skip_reading_prefix_cache=True,
    )
    assert not plain.HasField("scheduling")


async def test_wrong_scheduling_flags_are_named_with_the_others() -> None:
    flags = ("--top-p", "2", "--ttft-target", "0", "--tenant", "t" * 129)
    result = await quire("generate", "--prompt", "x", *flags)
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "quire: top_p: must be in (0, 1], got 2.0; "
        "tenant: must be at most 128 bytes, got 129; "
        "ttft_target_ms: must be from 1 to 4294967295, got 0\n"
    )


async def test_a_priority_of_another_program_is_told_its_name_here() -> None:
    result = await quire("generate", "--prompt", "x", "--priority", "1")
    assert (result.code, result.out) == (2, "")
    assert "there is no flag --priority; did you mean --priority-class?" in result.err


async def test_one_json_object() -> None:
    async with serving(FakeTextService()) as target:
        result = await quire(
            "generate", "--prompt", "-", "--json", "--seed", "7", "--target", target, stdin="é"
        )
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    answer = json.loads(result.out)
    assert answer.pop("request_id")
    assert answer == {
        "text": ANSWER,
        "token_ids": [0, 1, 2, 3, 4],
        "finish_reason": "stop",
        "stop": 2,
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 1},
        "seed": 7,
        "trace_id": "",
    }


@pytest.mark.parametrize("command", [("generate", "--prompt", "Hi"), ("chat", "Hi")])
async def test_a_server_that_is_not_ready_is_waited_for_with_a_word(
    command: tuple[str, ...],
) -> None:
    async with serving(FakeTextService(), ready=False) as target:
        result = await quire(*command, "--target", target)
    assert (result.code, result.out) == (0, f"{ANSWER}\n")
    assert result.err == (f"quire: {target} is not ready to serve; the request waits for it\n")


async def test_no_server_says_how_to_start_one() -> None:
    result = await quire("generate", "--prompt", "Hi", "--target", "127.0.0.1:1")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "quire: cannot reach 127.0.0.1:1 (Connection refused); start a server with: quire up\n"
    )


async def test_a_server_that_does_not_come_back_is_not_said_to_be_missing() -> None:
    error = AnswerCut("the answer was cut and cannot be taken up again: it is gone")

    def fail() -> int:
        raise error

    # The wait for it to come back takes as long as it says; here is what is said after it.
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        assert guarded(fail) == 1
    assert stderr.getvalue() == f"quire: {error.message}\n"


async def test_a_disk_that_is_full() -> None:
    async with serving(FakeTextService()) as target:
        command = (sys.executable, "-m", "quire", "generate", "--prompt", "Hi", "--target", target)
        with full_disk() as full:
            async with started(*command, stdout=full) as process:
                _, err = await process.communicate()
    assert (process.returncode, err) == (1, b"quire: No space left on device\n")


async def test_a_refusal_is_one_line() -> None:
    service = FakeTextService(refusal=failure("INVALID_ARGUMENT", "prompt: must not be empty"))
    async with serving(service) as target:
        result = await quire("generate", "--prompt", "", "--target", target)
    assert (result.code, result.err) == (1, "quire: prompt: must not be empty\n")


async def test_ctrl_c_ends_the_request() -> None:
    service = FakeTextService(pause=2)
    async with serving(service) as target:
        command = (sys.executable, "-m", "quire", "generate", "--prompt", "Hi", "--target", target)
        async with started(*command) as process:
            assert process.stdout is not None
            assert await process.stdout.readuntil(b"w1") == b" w0 w1"
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
        async with asyncio.timeout(10):
            await service.ended_early.wait()
    assert (process.returncode, err) == (130, b"quire: interrupted\n")
    assert out == b"\n"


async def test_a_reader_that_goes_away_is_no_error() -> None:
    service = FakeTextService(length=1000, pause=1)
    async with serving(service) as target:
        command = (sys.executable, "-m", "quire", "generate", "--prompt", "Hi", "--target", target)
        read, write = os.pipe()
        async with started(*command, stdout=write) as process:
            os.close(write)
            await service.paused.wait()
            os.close(read)
            service.go_on.set()
            _, err = await process.communicate()
    assert (process.returncode, err) == (128 + signal.SIGPIPE, b"")


async def test_one_question() -> None:
    service = FakeTextService()
    async with serving(service) as target:
        result = await quire("chat", "--system", "be brief", "--target", target, "What", "is?")
        piped = await quire("chat", "--json", "--target", target, stdin="from a file")
    assert (result.code, result.out, result.err) == (0, f"{ANSWER}\n", "")
    assert json.loads(piped.out)["text"] == ANSWER
    asked = [[(m.role, m.content) for m in request.messages] for request in service.requests]
    assert asked == [
        [("system", "be brief"), ("user", "What is?")],
        [("user", "from a file")],
    ]


class Terminal:
    """A person at a terminal."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    async def wait_for(self, text: str) -> None:
        """Reads until `text` has appeared since the last time."""
        async with asyncio.timeout(20):
            while text not in self.seen:
                data = await asyncio.to_thread(os.read, self.descriptor, 4096)
                self.seen += data.decode()
        self.seen = self.seen.partition(text)[2]


async def test_a_conversation() -> None:
    service = FakeTextService(length=2)
    async with serving(service) as target:
        ours, theirs = pty.openpty()
        command = (sys.executable, "-m", "quire", "chat", "--target", target)
        ends: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        async with started(*command, **ends, env=environment(TERM="dumb")) as process:
            os.close(theirs)
            person = Terminal(ours)
            await person.wait_for("fake at")
            await person.wait_for("> ")
            person.type("one\n")
            await person.wait_for("w0 w1")
            await person.wait_for("> ")
            service.pause = 1
            person.type("two\n")
            await person.wait_for("w0")
            await service.paused.wait()
            process.send_signal(signal.SIGINT)
            await person.wait_for("(stopped)")
            await person.wait_for("> ")
            service.pause = None
            person.type("three\n")
            await person.wait_for("w0 w1")
            await person.wait_for("> ")
            service.refusal = failure("NOT_FOUND", "the model is gone")
            person.type("four\n")
            await person.wait_for("quire: the model is gone")
            await person.wait_for("> ")
            person.type("\x04")
            await process.wait()
        os.close(ours)
    assert process.returncode == 0
    asked = [(message.role, message.content) for message in service.requests[-2].messages]
    assert asked == [
        ("user", "one"),
        ("assistant", " w0 w1"),
        ("user", "two"),
        ("assistant", " w0"),
        ("user", "three"),
    ]


@pytest.mark.parametrize(
    ("options", "ready", "code", "out"),
    [
        ((), False, 0, "SERVING\n"),
        (("--service", "quire.v1.TextService"), True, 0, "SERVING\n"),
        (("--service", "quire.v1.TextService"), False, 1, "NOT_SERVING\n"),
    ],
)
async def test_health(options: tuple[str, ...], *, ready: bool, code: int, out: str) -> None:
    async with serving(FakeTextService(), ready=ready) as target:
        result = await quire("health", target, *options)
    assert (result.code, result.out, result.err) == (code, out, "")


async def test_health_of_nobody() -> None:
    result = await quire("health", "127.0.0.1:1")
    assert (result.code, result.err) == (
        1,
        "quire: cannot reach 127.0.0.1:1 (Connection refused)\n",
    )
    async with serving(FakeTextService()) as target:
        unknown = await quire("health", target, "--service", "x")
    assert (unknown.code, unknown.err) == (1, f"quire: {target} has no service 'x'\n")


async def test_an_answer_has_a_limit_unless_told_otherwise() -> None:
    service = FakeTextService()
    async with serving(service) as target:
        await quire("generate", "--prompt", "Hi", "--target", target)
    (request,) = service.requests
    assert request.stopping.max_tokens == 512


@pytest.mark.parametrize("arguments", [("chat", ""), ("chat", "  "), ("chat",), ("chat", "-")])
async def test_an_empty_question_is_not_asked(arguments: tuple[str, ...]) -> None:
    service = FakeTextService()
    async with serving(service) as target:
        result = await quire(*arguments, "--target", target, stdin="\n")
    assert result.code == 2
    assert "the question is empty" in result.err
    assert not service.requests


async def test_a_name_that_does_not_resolve_is_told_plainly() -> None:
    result = await quire("generate", "--prompt", "Hi", "--target", "nonsense.invalid:1")
    assert result.code == 1
    assert "])" not in result.err


async def test_the_trace_goes_to_the_receiver_and_its_id_into_the_json() -> None:
    service = FakeTextService()
    async with serving(service) as target, receiving() as receiver:
        result = await quire(
            *("generate", "--prompt", "Hi", "--json", "--target", target),
            *("--otlp-traces-endpoint", receiver.url),
        )
        assert (result.code, result.err) == (0, "")
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_SERVICE_NAME": "mine"}
        again = await quire("chat", "Hi", "--target", target, **environment)
        assert (again.code, again.out) == (0, f"{ANSWER}\n")
    first, second = receiver.spans
    assert json.loads(result.out)["trace_id"] == first.trace_id
    assert service.metadata[0]["traceparent"].split("-")[1:3] == [first.trace_id, first.span_id]
    assert (first.line, second.line) == ("quire-cli CLIENT text_completion", "mine CLIENT chat")


async def test_a_receiver_that_is_away_is_one_line_and_no_failure() -> None:
    async with serving(FakeTextService()) as target:
        with dead_url() as url:
            result = await quire(
                "generate", "--prompt", "Hi", "--target", target, "--otlp-traces-endpoint", url
            )
    assert (result.code, result.out) == (0, f"{ANSWER}\n")
    assert result.err == f"quire: the trace could not be sent to {url}\n"


async def test_a_url_that_is_none_is_refused() -> None:
    result = await quire("generate", "--prompt", "Hi", "--otlp-traces-endpoint", "host:4317")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "quire: --otlp-traces-endpoint must begin with http:// or https://, got 'host:4317'\n"
    )


WITHOUT_SDK = """
import sys
sys.modules["opentelemetry.sdk"] = None
from quire.cli.main import main
sys.exit(main())
"""


async def test_without_the_sdk_the_flag_names_the_extra_and_the_variable_is_told() -> None:
    needs = "needs the extra [tracing]; install it with: pip install 'quire-llm[tracing]'"
    async with serving(FakeTextService()) as target:
        for flag, variables, code, said in (
            (("--otlp-traces-endpoint=http://a:1",), {}, 1, f"--otlp-traces-endpoint {needs}"),
            (
                (),
                {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"},
                0,
                f"nothing is traced: OTEL_EXPORTER_OTLP_ENDPOINT {needs}",
            ),
        ):
            arguments = ("generate", "--prompt", "Hi", "--target", target, *flag)
            command = (sys.executable, "-c", WITHOUT_SDK, *arguments)
            async with started(*command, env=environment(**variables)) as process:
                out, err = await process.communicate()
            assert (process.returncode, err.decode()) == (code, f"quire: {said}\n")
            assert out.decode() == ("" if code else f"{ANSWER}\n")
