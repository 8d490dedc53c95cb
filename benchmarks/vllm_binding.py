"""The processors of vLLM's threads, the same for every vLLM that a benchmark compares.

A server of vLLM binds its threads by itself, and reserves one processor more for a `kv_transfer_config`; of two it then reserves
none, so that vLLM with a connector has both and plain vLLM one. In the caller's process vLLM binds nothing.
"""

from __future__ import annotations

import os


def cores() -> list[int]:
    """The processors that this process may use, all of which every vLLM has."""
    return sorted(os.sched_getaffinity(0))


def environment() -> dict[str, str]:
    """Variables of a new process by which its threads are `wanted`, whether vLLM binds them or OpenMP does."""
    listed = ",".join(map(str, cores()))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": listed,
        "OMP_NUM_THREADS": str(len(cores())),
        "MKL_NUM_THREADS": str(len(cores())),  # which torch asks first
        "OMP_PLACES": f"{{{listed}}}",
        "OMP_PROC_BIND": "true",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def wanted() -> dict[str, object]:
    """What `seen` says in a process that started with `environment`: a thread for each processor, each on all of them."""
    return {"threads": len(cores()), "processors": [cores()]}


def seen() -> dict[str, object]:
    """How this process is bound: how many threads an operation of torch uses, and on which processors the process's threads may
    run, each different set once."""
    import torch

    torch.ones(1 << 20).sin().sum()  # so that OpenMP's threads are there
    masks = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
    return {"threads": torch.get_num_threads(), "processors": sorted(map(list, masks))}
