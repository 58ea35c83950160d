"""What the model thread says of its time."""

import asyncio
import threading

from services.worker.model_thread import ModelThread, ThreadTimes


async def test_time_under_way_counts_and_never_goes_back():
    thread = ModelThread(asyncio.get_running_loop())
    seen: list[ThreadTimes] = [thread.times()]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(thread.times())

    watching = asyncio.to_thread(watch)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watching)
            for _ in range(300):
                await thread.submit(lambda: None)
            hold = threading.Event()
            held = thread.submit(hold.wait)
            while not thread.busy_s:
                await asyncio.sleep(0.001)
            before = thread.times()
            await asyncio.sleep(0.01)
            after = thread.times()
            hold.set()
            await held
            done.set()
    finally:
        done.set()
        assert await thread.close(5)
    assert after.busy_ns > before.busy_ns
    assert after.idle_ns == before.idle_ns
    for column in ("busy_ns", "idle_ns"):
        values = [getattr(times, column) for times in seen]
        assert values == sorted(values)
    assert thread.busy_s == 0.0
