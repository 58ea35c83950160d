"""Quire by a tool that has no stubs of it: `buf curl` asks by reflection, as grpcurl does.

The README shows these calls.
"""

import asyncio
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import System

pytestmark = [pytest.mark.system, pytest.mark.demo_model]

BUF = Path(sysconfig.get_path("scripts")) / "buf"


async def curl(system: System, method: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of `buf curl`."""
    url = f"http://{system.local.target}{method}"
    process = await asyncio.create_subprocess_exec(
        *(BUF, "curl", "--protocol", "grpc", *arguments, url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def called(system: System, method: str, request: object = None) -> list[Any]:
    """The messages of an answer."""
    data = () if request is None else ("--data", json.dumps(request))
    code, out, err = await curl(system, f"/{method}", *data)
    assert code == 0, err
    messages, at = [], 0
    while rest := out[at:].lstrip():
        message, length = json.JSONDecoder().raw_decode(rest)
        messages.append(message)
        at = len(out) - len(rest) + length
    return messages


async def test_services_and_methods_are_listed(system: System) -> None:
    code, out, err = await curl(system, "", "--list-services")
    assert code == 0, err
    assert {"quire.v1.TextService", "grpc.health.v1.Health"} <= set(out.split())
    code, out, err = await curl(system, "", "--list-methods")
    assert code == 0, err
    assert {"quire.v1.TextService/Generate", "quire.v1.TextService/Chat"} <= set(out.split())


async def test_a_call_and_its_answer_are_json(system: System) -> None:
    (info,) = await called(system, "quire.v1.TextService/GetInfo")
    assert info["model"] == (await system.client.info()).model
    health = {"service": "quire.v1.TextService"}
    assert await called(system, "grpc.health.v1.Health/Check", health) == [{"status": "SERVING"}]


async def test_an_answer_is_streamed(system: System) -> None:
    request = {
        "text": "The capital of France is",
        "sampling": {"temperature": 0},
        "stopping": {"maxTokens": 8},
        "scheduling": {"priorityClass": "interactive", "tenant": "acme"},
    }
    messages = await called(system, "quire.v1.TextService/Generate", request)
    assert len(messages) > 2
    assert "".join(message["text"] for message in messages).startswith(" Paris")
    assert messages[-1]["finished"]["usage"] == {"promptTokens": 5, "completionTokens": 8}


async def test_a_refusal_has_its_details(system: System) -> None:
    data = json.dumps({"text": "Hi", "sampling": {"topP": 2}})
    code, _, err = await curl(system, "/quire.v1.TextService/Generate", "--data", data)
    assert code != 0
    error = json.loads(err)
    assert error["code"] == "invalid_argument"
    assert error["message"] == "sampling.top_p: must be in (0, 1], got 2"
    assert [detail["type"] for detail in error["details"]] == ["google.rpc.BadRequest"]
