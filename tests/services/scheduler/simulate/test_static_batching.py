"""The baseline v0: when batches are formed, what they reserve, when they end."""

import pytest

from services.scheduler.core.config import Config
from services.scheduler.core.plan import LinkFault, Refused, StepResult
from services.scheduler.simulate.load import Arrival, ClosedLoop, OpenLoop, Prompts, RequestMaker
from services.scheduler.simulate.loop import Simulation
from services.scheduler.simulate.report import Report
from services.scheduler.simulate.static_batching import StaticBatching
from services.scheduler.simulate.step_model import StepModel
from services.scheduler.simulate.worker import SimulatedWorker

MODEL = StepModel(
    name="small",
    base_us=10_000.0,
    per_token_us=100.0,
    per_row_us=0.0,
    per_context_us=0.0,
    blocks=64,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=512,
)


def of(at_us: int, prompt: int, output: int, **fields: object) -> Arrival:
    return Arrival(at_us=at_us, prompt_tokens=prompt, output_tokens=output, **fields)


def run(coming: list[Arrival], engine: StaticBatching | None = None, workers: int = 1) -> Report:
    simulation = Simulation(
        engine or StaticBatching(Config()),
        OpenLoop(coming),
        MODEL,
        Prompts(0, MODEL.max_model_len),
        workers=workers,
    )
    simulation.run()
    return simulation.report("v0")


def test_a_batch_is_prefilled_together_and_decodes_together() -> None:
    report = run([of(0, 100, 3), of(0, 60, 3)])
    # One step of 160 tokens, above any budget; then two of two rows.
    assert report.ttft_ms.mean == report.ttft_ms.max == 26.0
    assert report.tpot_ms.mean == 10.2
    assert report.completed == 2
    assert report.output_tokens == 6


def test_what_comes_later_waits_for_the_last_of_the_batch() -> None:
    # The first ends at 13.2 ms, the second 20 steps of one row later; only then the third starts.
    report = run([of(0, 16, 1), of(0, 16, 21), of(1, 16, 1)])
    waited = 13.2 + 20 * 10.1 + 11.6
    assert report.ttft_ms.max == pytest.approx(waited, abs=0.01)


def test_the_whole_context_is_reserved_until_the_batch_ends() -> None:
    engine = StaticBatching(Config())
    simulation = Simulation(
        engine,
        OpenLoop([of(0, 16, 1), of(0, 16, 40, max_tokens=112)]),
        MODEL,
        Prompts(0, MODEL.max_model_len),
    )
    simulation.advance()
    # 17 tokens are 2 blocks, 128 are 8.
    assert engine.loads().workers[0].blocks_free == 64 - 10
    simulation.run(until=200_000)
    assert engine.loads().running == 1
    assert engine.loads().workers[0].blocks_free == 64 - 10, "the first has ended"
    simulation.run()
    assert engine.loads().workers[0].blocks_free == 64
    assert simulation.report("v0").filled_of_held < 0.4


def test_a_batch_takes_no_more_than_the_cache_can_reserve() -> None:
    # 16 + 240 tokens reserve 16 blocks of 64: four at a time.
    report = run([of(0, 16, 100, max_tokens=240) for _ in range(8)])
    assert report.most_running == 4
    assert report.completed == 8
    assert report.kv_most_held == 1.0


def test_a_batch_takes_no_more_than_the_sequence_cap() -> None:
    assert run([of(0, 16, 5) for _ in range(20)]).most_running == 8
    capped = StaticBatching(Config(max_num_seqs=3))
    assert run([of(0, 16, 5) for _ in range(20)], capped).most_running == 3


def test_the_longest_context_can_be_reserved_for_each() -> None:
    report = run([of(0, 16, 5) for _ in range(4)], StaticBatching(Config(), reserve_tokens=512))
    assert report.most_running == 2, "512 tokens are half of the cache"
    alone = run([of(0, 16, 5) for _ in range(4)], StaticBatching(Config(), reserve_tokens=9999))
    assert alone.most_running == 1


def test_requests_end_by_what_is_said_or_by_their_bound() -> None:
    report = run([of(0, 16, 5, max_tokens=9), of(0, 16, 5)])
    assert report.ends == {"length": 1, "stop": 1}
    assert report.output_tokens == 10


def test_clients_that_go_away_free_their_places() -> None:
    report = run(
        [of(0, 16, 400, cancel_after_us=50_000), of(1, 16, 5, cancel_after_us=2), of(2, 16, 5)]
    )
    assert report.ends == {"abort": 2, "length": 1}
    assert report.duration_s < 0.2


def test_batches_follow_one_another_in_a_closed_loop() -> None:
    simulation = Simulation(
        StaticBatching(Config()),
        ClosedLoop((of(0, 16, 5) for _ in range(40)), 4),
        MODEL,
        Prompts(0, MODEL.max_model_len),
    )
    simulation.run()
    assert simulation.report("v0").completed == 40


def test_each_worker_has_a_batch_of_its_own() -> None:
    coming = [of(0, 16, 20) for _ in range(16)]
    assert run(coming, workers=2).duration_s < 0.6 * run(coming).duration_s


def test_what_can_never_fit_is_refused() -> None:
    engine = StaticBatching(Config())
    engine.attach(MODEL.spec("w"), 0)
    request = RequestMaker(Prompts(0, 1024)).make(of(0, 600, 5), 0)
    with pytest.raises(Refused) as error:
        engine.add(request, 0)
    assert error.value.refusal.reason == "CONTEXT_LENGTH"


def test_a_result_of_another_step_is_a_fault() -> None:
    engine = StaticBatching(Config())
    spec, _, _ = engine.attach(MODEL.spec("w"), 0)
    engine.add(RequestMaker(Prompts(0, 512)).make(of(0, 16, 5), 0), 0)
    plan = engine.plan("w", 0)
    assert plan is not None
    result = SimulatedWorker(spec, MODEL).submit(plan, 0).result
    wrong = StepResult(
        epoch=result.epoch, step_id=9, counts=result.counts, token_ids=result.token_ids
    )
    with pytest.raises(LinkFault):
        engine.apply("w", wrong, 0)
