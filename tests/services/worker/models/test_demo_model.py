"""The demo model against recorded outputs of `transformers`, with prompts cut and mixed at will."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from quire.models import ModelNotFound, locate_model
from tests.services.worker.models.paged_run import PagedRun

REFERENCE = Path(__file__).parents[3] / "reference" / "smollm2_greedy.json"
NEAR_TIE = 1e-3
"""Below this distance of the two highest logits, the order of additions may choose."""

pytestmark = pytest.mark.demo_model


@pytest.fixture(scope="module")
def reference():
    return json.loads(REFERENCE.read_text())


@pytest.fixture(scope="module")
def demo(load, reference):
    try:
        folder = locate_model("smollm2-135m-instruct").path
    except ModelNotFound as error:
        pytest.skip(str(error))
    for file in folder.glob("*.gguf"):
        if hashlib.sha256(file.read_bytes()).hexdigest() == reference["model_sha256"]:
            return load(folder)
    pytest.skip(f"{folder} does not hold the weights that the reference was made with")


@pytest.fixture(autouse=True)
def one_thread():
    """These matrices are large enough for all threads."""
    torch.set_num_threads(2)


def choose(cases):
    """The shortest prompt, the shortest of the long ones, and five between."""
    by_length = sorted(cases, key=lambda case: len(case["prompt"]))
    short = [case for case in by_length if len(case["prompt"]) < 1000]
    return [*short[:: len(short) // 5][:6], by_length[len(short)]]


def test_greedy_ids_are_the_recorded_ones(demo, kernels, reference):
    cases = choose(reference["cases"])
    prompts = [case["prompt"] for case in cases]
    assert len(prompts) == 7
    longest = max(map(len, prompts)) + reference["max_new_tokens"]
    run = PagedRun(demo, kernels, prompts, block_size=16, room=longest)
    generate(run, demo.config.eos_token_ids, reference["max_new_tokens"])
    for case, row in zip(cases, run.rows, strict=True):
        check_same(case, row[len(case["prompt"]) :])


def generate(run, ends, max_new_tokens):
    """Greedy, all rows at once: each enters at another step and is prefilled in odd chunks."""
    prompts = [len(row) for row in run.rows]
    for step in range(10_000):
        chunks = {}
        for row, ids in enumerate(run.rows):
            done = len(ids) - prompts[row]
            ended = done == max_new_tokens or (done and ids[-1] in ends)
            if not ended and step >= 2 * row:
                size = 7 + 13 * row if prompts[row] < 1000 else 192
                chunks[row] = min(size, len(ids) - run.computed[row])
        if not chunks and step > 2 * len(prompts):
            return
        if chunks:
            for row, logits in run.step(chunks, logits="last").items():
                if run.computed[row] == len(run.rows[row]):
                    run.rows[row].append(int(logits.argmax()))


def check_same(case, got):
    """Equal, up to the first near-tie of the recorded run."""
    for place, (token, wanted, gap) in enumerate(
        zip(got, case["output"], case["gaps"], strict=False)
    ):
        if token != wanted:
            assert gap <= NEAR_TIE, f"token {place} is {token}, not {wanted}, at a gap of {gap}"
            return
    assert len(got) == len(case["output"])


def test_the_reference_covers_what_it_should(reference):
    lengths = [len(case["prompt"]) for case in reference["cases"]]
    assert len({tuple(case["prompt"]) for case in reference["cases"]}) == len(lengths) >= 64
    assert sum(1000 <= length <= 2000 for length in lengths) >= 4
    assert min(lengths) == 1
    assert sum(length <= 200 for length in lengths) >= 60
    for case in reference["cases"]:
        assert len(case["output"]) == len(case["gaps"])
        assert case["finish"] == "stop" or len(case["output"]) == reference["max_new_tokens"]
    assert REFERENCE.stat().st_size < 2**20
