"""What the machine is, as the system says: processors, CPU quotas, memory nodes. Trees of files stand for other machines."""

import math
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

import indexes._native as index_native
import kvdb._native as kvdb_native

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def lay(root, **files):
    """Write files below `root`, whose names are paths with two underscores for a slash and one for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"proc__self__cgroup": "0::/", "sys__fs__cgroup__cpu_DOT_max": "150000 100000"}, 1.5),
        ({"proc__self__cgroup": "0::/", "sys__fs__cgroup__cpu_DOT_max": "max 100000"}, math.inf),
        ({"proc__self__cgroup": "0::/a/b", "sys__fs__cgroup__a__b__cpu_DOT_max": "400000 100000"}, 4),
        (
            {
                "proc__self__cgroup": "0::/a/b",
                "sys__fs__cgroup__a__b__cpu_DOT_max": "400000 100000",
                "sys__fs__cgroup__a__cpu_DOT_max": "50000 20000",
            },
            2.5,
        ),
        (
            {
                "proc__self__cgroup": "5:memory:/x\n3:cpu,cpuacct:/pod/one\n0::/",
                "sys__fs__cgroup__cpu,cpuacct__pod__one__cpu_DOT_cfs_quota_us": "300000",
                "sys__fs__cgroup__cpu,cpuacct__pod__one__cpu_DOT_cfs_period_us": "100000",
            },
            3,
        ),
        (  # a container that sees the host's path, while its own group is what is mounted
            {
                "proc__self__cgroup": "3:cpu,cpuacct:/docker/abc",
                "sys__fs__cgroup__cpu__cpu_DOT_cfs_quota_us": "200000",
                "sys__fs__cgroup__cpu__cpu_DOT_cfs_period_us": "100000",
            },
            2,
        ),
        (
            {
                "proc__self__cgroup": "1:cpu:/",
                "sys__fs__cgroup__cpu__cpu_DOT_cfs_quota_us": "-1",
                "sys__fs__cgroup__cpu__cpu_DOT_cfs_period_us": "100000",
            },
            math.inf,
        ),
        ({"proc__self__cgroup": "no group\n0::/", "sys__fs__cgroup__cpu_DOT_max": "many"}, math.inf),
    ],
)
def test_the_smallest_quota_of_the_groups_counts(tmp_path, files, quota):
    assert kvdb_native.cpu_quota(lay(tmp_path, **files)) == quota


def test_the_default_is_the_processors_of_the_affinity():
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); import kvdb._native as n; print(n.threads())"
    environment = {name: value for name, value in os.environ.items() if name != "KVDB_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"
    assert 1 <= kvdb_native.usable_cpus() <= len(CPUS)


def test_nodes_are_those_with_memory_and_processors_that_may_be_used(tmp_path):
    folder = "sys__devices__system__node__"
    cpus = ",".join(map(str, CPUS))
    files = {"has_memory": "0-1,3", "node0__cpulist": cpus, "node1__cpulist": "", "node2__cpulist": cpus, "node3__cpulist": cpus}
    root = lay(tmp_path, **{folder + name: text for name, text in files.items()})
    assert kvdb_native.memory_nodes(root) == [(0, CPUS), (3, CPUS)]
    assert index_native.memory_nodes(str(tmp_path / "nowhere")) == []


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 5)), max_size=6))
def test_lists_of_processors_are_read_as_the_system_writes_them(ranges):
    """A node's processors are those of its list that this thread may use; nothing else is taken for one."""
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    folder = "sys__devices__system__node__"
    with TemporaryDirectory() as passing:
        root = lay(Path(passing), **{folder + "has_memory": "0", folder + "node0__cpulist": text})
        named = [cpu for first, more in ranges for cpu in range(first, first + more + 1) if cpu in CPUS]
        assert kvdb_native.memory_nodes(root) == ([(0, named)] if named else [])


def test_wrong_nodes_are_refused():
    for nodes in ([(-1, [0])], [(1024, [0])], [(0, [])]):
        with pytest.raises(ValueError, match=r"node .* processors; expected a number from 0 to 1023 and at least one"):
            kvdb_native.set_memory_nodes(nodes)


def run(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout.split()


TWO_NODES = f"""
import os
import numpy as np
import kvdb._native as native
native.set_memory_nodes([(0, [{CPUS[0]}]), (1, [{CPUS[-1]}])])
"""


@pytest.mark.skipif(len(CPUS) < 2 or not os.path.exists("/proc/self/task"), reason="needs two processors, and Linux")
def test_each_thread_stays_at_one_of_several_nodes():
    script = f"""{TWO_NODES}
before = set(os.listdir("/proc/self/task"))
native.set_threads(5)
geometry, blocks = native.Geometry(native.Dtype.float32, 2, 64, 64), np.zeros((64, 2, 2, 64, 64), np.float32)
table = blocks.ctypes.data + np.arange(64, dtype=np.uint64) * np.uint64(blocks[0].nbytes)
native.read_blocks(geometry, table)
started = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
while any(len(os.sched_getaffinity(task)) > 1 for task in started):
    os.sched_yield()
print(*(min(os.sched_getaffinity(task)) for task in started))
"""
    assert sorted(run(script)) == sorted(str(CPUS[-1] if number % 2 else CPUS[0]) for number in range(1, 5))


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="needs a Linux with memory nodes")
def test_large_memory_is_asked_from_all_nodes_in_turns():
    script = f"""{TWO_NODES}
from indexes.arena import Arena
arena = Arena(4 << 20)
print(*(line.split()[1] for line in open("/proc/self/numa_maps") if line.startswith(f"{{arena.address:x}}")))
native.set_memory_nodes([(0, [{CPUS[0]}])])
print(native.interleave(arena.address, arena.nbytes))
"""
    policy, alone = run(script)
    assert policy.startswith("interleave:")
    assert alone == "False"
