"""The worker as a process: what it registers, its health, its end, and how it refuses to start."""

import asyncio
import contextlib
import re
import signal
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.scheduler_link import FakeScheduler, ids, new_request, step
from tests.services.worker.scraping import scrape

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.system


async def start(*argv):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.worker", *argv, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )


@contextlib.asynccontextmanager
async def worker(*argv):
    """A worker process, killed at the end if it still runs."""
    process = await start(*argv)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def health(address):
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="quire.v1.WorkerLinkService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_from_start_to_sigterm(tmp_path, model_folder, bench):
    scheduler_address = f"unix://{tmp_path}/s.sock"
    health_address = f"unix://{tmp_path}/h.sock"
    argv = [
        *("--model", str(model_folder), "--served-model-name", "tiny"),
        *("--scheduler", scheduler_address, "--listen", health_address, "--worker-id", "w-7"),
        *("--block-size", "4", "--max-num-seqs", "3", "--kv-cache-memory", "100KiB"),
        *("--max-num-batched-tokens", "24", "--num-threads", "1", "--device", "cpu"),
    ]
    async with FakeScheduler.listening(scheduler_address) as scheduler, worker(*argv) as process:
        link = await scheduler.next_link()
        said = link.register
        assert (said.worker_id, said.model, said.protocol_major) == ("w-7", "tiny", 1)
        assert said.model_digest == bench.loaded.digest
        assert (said.dtype, said.device, said.block_size) == ("float32", "cpu", 4)
        # 2 layers, keys and values, 2 heads of 16 numbers of 4 bytes: 2 KiB a block of 4 tokens.
        assert said.num_blocks == 50
        assert (said.max_num_seqs, said.max_num_batched_tokens) == (3, 24)
        assert (said.max_model_len, said.vocab_size) == (64, bench.limits.vocab_size)
        assert list(said.eos_token_ids) == list(bench.loaded.config.eos_token_ids)
        assert said.instance_id
        assert said.max_in_flight == 2
        assert await health(health_address) == "NOT_SERVING"

        await link.accept(epoch=1)
        await link.send(
            step(step_id=1, new=[new_request(2, [11, 12, 13])], rows=[(2, 3, [49])]),
            step(step_id=2, rows=[(2, 1, [])]),
        )
        tokens = [*ids((await link.result()).token_ids), *ids((await link.result()).token_ids)]
        assert tokens == bench.alone([11, 12, 13], 2)
        assert await health(health_address) == "SERVING"

        process.send_signal(signal.SIGTERM)
        assert (await link.received()).WhichOneof("message") == "bye"
        _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
    lines = log.decode().splitlines()
    assert [line for line in lines if "ready after" in line and "import" in line]
    assert not [line for line in lines if " E " in line or "Traceback" in line]


async def test_metrics_are_served_while_it_runs(tmp_path, model_folder):
    scheduler_address = f"unix://{tmp_path}/s.sock"
    argv = [
        *("--model", str(model_folder), "--scheduler", scheduler_address, "--device", "cpu"),
        *("--kv-cache-memory", "100KiB", "--num-threads", "1", "--max-num-seqs", "3"),
        *("--enable-metrics", "--metrics-port", "0"),
    ]
    async with FakeScheduler.listening(scheduler_address) as scheduler, worker(*argv) as process:
        link = await scheduler.next_link()
        log = ""
        while (found := re.search(r"metrics on http://127\.0\.0\.1:(\d+)/metrics", log)) is None:
            log += (await process.stderr.readline()).decode()
        assert "computing in float32 on cpu, threads: 1 (--num-threads)" in log
        await link.accept(epoch=1)
        await link.send(
            step(step_id=1, new=[new_request(2, [11, 12, 13])], rows=[(2, 3, [1])]),
            step(step_id=2, rows=[(2, 1, [])]),
        )
        await link.result()
        await link.result()
        read = await asyncio.to_thread(scrape, int(found[1]))
        assert read["quire_worker_tokens_total", "prefill"] == 3
        assert read["quire_worker_tokens_total", "decode"] == 1
        assert read["quire_worker_attached",] == 1
        assert read["quire_worker_load_time_seconds",] > 0
        assert read["quire_worker_busy_time_seconds_total",] > 0
        process.send_signal(signal.SIGTERM)
        assert (await link.received()).WhichOneof("message") == "bye"
        await process.communicate()
        assert process.returncode == 0


async def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(tmp_path):
    async with worker("--model", str(tmp_path / "nowhere")) as process:
        _, error = await process.communicate()
    assert process.returncode == 2
    (line,) = error.decode().splitlines()
    assert "nowhere" in line


async def test_sigterm_while_loading_is_an_orderly_end(tmp_path, model_folder):
    argv = ["--model", str(model_folder), "--scheduler", f"unix://{tmp_path}/s.sock"]
    async with worker(*argv) as process:
        assert b"loading random-2-layers" in await process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
    assert process.returncode == 0, log.decode()
    assert "Traceback" not in log.decode()
