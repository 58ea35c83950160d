import mmap
import os

import pytest

from services.worker.machine import Machine, Processors, claim_name

GIB = 2**30


def machine(tmp_path, groups: str, files: dict[str, str]) -> Machine:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * 2**20} kB\n")
    (proc / "self/cgroup").write_text(groups)
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(proc=proc, cgroup=cgroup)


def test_without_control_groups_the_machine_is_the_limit(tmp_path):
    free = machine(tmp_path, "", {})
    assert free.available_memory() == 8 * GIB
    assert free.processors(6).count == 6


def test_version_2_limits_of_every_level_count(tmp_path):
    inside = machine(
        tmp_path,
        "0::/pod/container\n",
        {
            "pod/memory.max": str(4 * GIB),
            "pod/memory.current": str(2 * GIB),
            "pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "pod/container/memory.max": "max\n",
            "pod/container/memory.current": str(GIB),
            "pod/cpu.max": "max 100000\n",
            "pod/container/cpu.max": "250000 100000\n",
        },
    )
    assert inside.available_memory() == 3 * GIB
    assert inside.processors(16) == Processors(3, "cgroup quota 2.5 of 16")
    assert inside.processors(3) == Processors(3, "affinity")
    assert inside.processors(2) == Processors(2, "affinity")


def test_version_1_limits_and_a_path_that_is_not_mounted(tmp_path):
    inside = machine(
        tmp_path,
        "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        {
            "memory/memory.limit_in_bytes": str(GIB),
            "memory/memory.usage_in_bytes": str(GIB // 2),
            "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 4096\n",
            "cpu/cpu.cfs_quota_us": "50000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert inside.available_memory() == GIB // 2 + 4096
    assert inside.processors(16).count == 1


def test_an_unlimited_quota_is_none(tmp_path):
    inside = machine(
        tmp_path,
        "3:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
    )
    assert inside.processors(16).count == 16


def test_more_used_than_allowed_leaves_nothing(tmp_path):
    inside = machine(tmp_path, "0::/\n", {"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert inside.available_memory() == 0


def test_this_process():
    here = Machine()
    assert 0 < here.resident() <= here.peak_resident()
    assert here.available_memory() > 0
    assert here.processors(len(os.sched_getaffinity(0))).count >= 1
    assert here.age_s() > 0


def test_memory_that_was_given_back_stays_in_the_peak():
    here = Machine()
    here.reset_peak()
    before = here.resident()
    # A mapping of its own: pages that the heap still holds would not count again.
    with mmap.mmap(-1, 64 * 2**20) as block:
        block.write(b"x" * len(block))
    assert here.peak_resident() - before >= 60 * 2**20


def test_a_missing_figure_is_an_error(tmp_path):
    broken = machine(tmp_path, "", {})
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        broken.available_memory()


def test_names_are_unique_while_held_and_come_back():
    prefix = f"test-{os.getpid()}"
    first, second = claim_name(prefix), claim_name(prefix)
    assert (first.name, second.name) == (f"{prefix}-0", f"{prefix}-1")
    first.claim.close()
    again = claim_name(prefix)
    assert again.name == f"{prefix}-0"
    again.claim.close()
    second.claim.close()
