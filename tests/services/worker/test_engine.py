import logging
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.chassis.process import StartupError
from services.worker.engine import StartUp, load_engine
from services.worker.machine import Machine
from services.worker.plan import Attachment, NewRow, StepPlan
from services.worker.settings import read_settings

SMALL = ("--max-num-seqs", "3", "--max-num-batched-tokens", "24", "--num-threads", "1")


@pytest.fixture(autouse=True)
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def load(folder, *argv):
    settings = read_settings(["--model", "m", "--device", "cpu", *SMALL, *argv], {})
    return load_engine(settings, folder, Machine(), StartUp(age_s=0.0))


def test_limits_come_from_settings_and_model(model_folder, bench):
    engine = load(model_folder, "--kv-cache-memory", "1MiB", "--max-model-len", "40")
    limits = engine.limits
    assert (limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens) == (16, 3, 24)
    assert (limits.max_model_len, limits.vocab_size) == (40, bench.limits.vocab_size)
    # 2 layers, keys and values, 2 heads of 16 numbers of 4 bytes: 8 KiB a block of 16 tokens.
    assert (limits.num_blocks, engine.cache.num_blocks) == (128, 128)
    assert torch.get_num_threads() == 1
    assert (engine.footprint.threads, engine.footprint.kv_cache_bytes) == (1, 2**20)
    assert engine.footprint.load_s > 0


def test_workers_of_one_machine_share_its_processors(model_folder, caplog):
    caplog.set_level(logging.INFO)
    argv = ["--model", "m", "--device", "cpu", "--max-num-batched-tokens", "24"]
    shared = read_settings([*argv, "--kv-cache-memory", "1MiB", "--local-workers", "10000"], {})
    load_engine(shared, model_folder, Machine(), StartUp(age_s=0.0))
    assert torch.get_num_threads() == 1
    (line,) = [text for text in caplog.messages if text.startswith("computing in")]
    assert line.startswith("computing in float32 on cpu, threads: 1 (")
    assert line.endswith(", --local-workers 10000)")


def test_the_log_says_that_the_number_of_threads_was_told(model_folder, caplog):
    caplog.set_level(logging.INFO)
    load(model_folder, "--kv-cache-memory", "1MiB", "--dtype", "bfloat16")
    assert "computing in bfloat16 on cpu, threads: 1 (--num-threads)" in caplog.messages


def test_each_attachment_starts_empty(model_folder):
    engine = load(model_folder, "--kv-cache-memory", "1MiB")
    granted = Attachment(epoch=1, max_num_seqs=3, num_slots=9, check_block_tables=False)
    row = NewRow(
        slot=4,
        token_ids=np.array([11, 12], np.uint32),
        prompt_len=2,
        num_computed=0,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        traceparent="",
    )
    results = []
    for epoch in (1, 2):
        plan = StepPlan(
            epoch=epoch,
            step_id=1,
            released_slots=np.zeros(0, np.int64),
            new_rows=(row,),
            slots=np.array([4]),
            num_tokens=np.array([2]),
            num_new_blocks=np.array([1]),
            new_block_ids=np.array([100]),
            block_table_digest=None,
        )
        results.append(engine.attach(replace(granted, epoch=epoch)).execute(plan))
    assert [result.counts.tolist() for result in results] == [[1], [1]]
    assert results[0].token_ids.tolist() == results[1].token_ids.tolist()


def test_without_a_size_the_pool_is_measured(model_folder):
    free = Machine().available_memory()
    engine = load(model_folder, "--gpu-memory-utilization", "0.001")
    size = engine.limits.num_blocks * engine.cache.spec.bytes_per_block
    assert free * 0.0005 < size < free * 0.002


def test_a_model_that_gives_no_numbers_is_a_warning(tmp_path, model_folder, caplog):
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] *= torch.inf
    save_file(tensors, broken / "model.safetensors")
    load(broken, "--kv-cache-memory", "1MiB")
    assert "logits that are not finite" in caplog.text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--kv-cache-memory", "1KiB"), "1KiB does not hold one block"),
        (("--max-model-len", "65"), "--max-model-len: must be in 1..64"),
        (("--device", "cuda"), "--device cuda"),
    ],
)
def test_what_cannot_be_used_is_one_line(model_folder, argv, says):
    if argv == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(StartupError) as caught:
        load(model_folder, *argv)
    assert re.search(says, str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_one_line(tmp_path):
    with pytest.raises(StartupError) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_phases_are_named_with_their_seconds():
    start_up = StartUp(age_s=1.5)
    start_up.end_of("load")
    start_up.end_of("profile")
    assert re.fullmatch(
        r"\d+\.\d\d s \(import 1\.50, load \d+\.\d\d, profile \d+\.\d\d\)", str(start_up)
    )
