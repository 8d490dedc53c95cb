"""What does kvdb save vLLM, and what does it cost? Each figure is of processes of their own, over SmolLM2 (`make real-model`).

    .venv-vllm/bin/python -m benchmarks.vllm {first-token,save-cost,prompts,chats} [--dtype float32]

first-token: seconds until the first token of a prompt (--tokens) in a new process: plain vLLM, vLLM with kvdb that another
process filled, its loads ahead of the layers or while the request waits ("async"), and vLLM with its own example connector over
files (`ExampleConnector`); --repeat processes each, in turns, of all --ways.
save-cost: requests without a hit, one after the other, with and without saving, in turns within a process.
prompts: greedy tokens of 20 prompts beside plain vLLM's: computed in batches, found in a second process in batches with cancelled
neighbours, and with so few blocks that requests are preempted.
chats: ten chats of five turns over a restart behind every turn.
Every process has its threads on the same processors, with a connector and without one (`vllm_binding.py`), which is checked and
printed. Needs vLLM, so it runs by vLLM's own Python.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from benchmarks import vllm_binding
from benchmarks.harness import argument_parser, machine, report
from engine_adapter.models.pretrained import novels, real_model_folder

Job = dict[str, Any]
PROCESS_S = 900.0
WAYS = ("plain", "kvdb", "async", "files")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2500, 7500])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="plain among them")
    parser.add_argument("--repeat", type=int, default=3, help="processes of each kind")
    given = parser.parse_args()
    report("machine", **machine(), every_vllm=vllm_binding.wanted())
    with tempfile.TemporaryDirectory(prefix="kvdb-vllm-") as folder:
        FIGURES[given.figure](given, Path(folder))


def first_token(given: argparse.Namespace, folder: Path) -> None:
    for tokens in given.tokens:
        call = [[{"prompt": prose(0, tokens), "tokens": 8}]]
        store = folder / f"store-{tokens}"
        all_ways = {"plain": None, "kvdb": kvdb_in(store), "files": files_in(folder / f"files-{tokens}")}
        connectors = {name: connector for name, connector in all_ways.items() if name in given.ways}
        filled = {name: run(given, connector, calls=call) for name, connector in connectors.items() if connector}
        if "async" in given.ways:
            connectors["async"] = kvdb_in(store, loads="async")
        found: dict[str, list[Job]] = {name: [] for name in connectors}
        for _ in range(given.repeat):
            for name, connector in [*connectors.items()]:
                try:
                    found[name].append(run(given, connector, calls=call)["calls"][0][0])
                except subprocess.CalledProcessError as error:
                    if name != "files":
                        raise
                    report("vllm.first_token", dtype=given.dtype, tokens=tokens, way=name, failed=error.stderr.splitlines()[-1])
                    del found[name], connectors[name]
        plain = median(one["first_s"] for one in found["plain"])
        for name, answers in found.items():
            report(
                "vllm.first_token",
                dtype=given.dtype,
                tokens=tokens,
                way=name,
                filled_s=filled[name]["calls"][0][0]["first_s"] if name in filled else None,
                first_s=median(one["first_s"] for one in answers),
                each_s=[round(one["first_s"], 3) for one in answers],
                times_sooner=plain / median(one["first_s"] for one in answers),
                cached=answers[0]["cached"],
                tokens_equal=[one["tokens"] == found["plain"][0]["tokens"] for one in answers],
            )


def save_cost(given: argparse.Namespace, folder: Path) -> None:
    each, turns, tokens = 3, 13, 512
    prompts = [prose((1 + i) * tokens, tokens) for i in range(each * turns)]
    grouped = [prompts[i : i + each] for i in range(0, len(prompts), each)]
    measured = run(given, kvdb_in(folder / "store"), turns=grouped)["turns"][1:]
    saving, without = (
        {name: median(turn[name] for turn in turns) for name in turns[0]} for turns in (measured[0::2], measured[1::2])
    )
    report(
        "vllm.save_cost",
        dtype=given.dtype,
        tokens=tokens,
        requests=each,
        turns=len(measured),
        without_s=without["requests_s"],
        requests_ratio=saving["requests_s"] / without["requests_s"],
        stored_ratio=saving["stored_s"] / without["requests_s"],
    )


def prompts(given: argparse.Namespace, folder: Path) -> None:
    made = [prose(700 * i, 40 + 31 * i) for i in range(20)]
    batches = [[{"prompt": prompt, "tokens": 12} for prompt in made[i : i + 4]] for i in range(0, 20, 4)]
    cancelled = [[*batch, {"prompt": prose(50_000 + 300 * i, 300), "tokens": 30, "cancel": 3}] for i, batch in enumerate(batches)]
    plain = run(given, None, calls=batches)
    few = {"num_gpu_blocks_override": 9, "max_model_len": 1024}  # of 128 tokens
    ways = {
        "computed": run(given, kvdb_in(folder / "store"), calls=batches),
        "found": run(given, kvdb_in(folder / "store"), calls=batches),
        "beside cancelled": run(given, kvdb_in(folder / "store"), calls=cancelled),
        "preempted": run(given, kvdb_in(folder / "other"), calls=batches, options=few),
    }
    for name, result in ways.items():
        pairs = [
            pair for one, other in zip(plain["calls"], result["calls"], strict=True) for pair in zip(one, other, strict=False)
        ]
        report(
            "vllm.prompts",
            dtype=given.dtype,
            way=name,
            prompts=len(pairs),
            tokens_equal=sum(one["tokens"] == other["tokens"] for one, other in pairs),
            cached=sum(other["cached"] for _, other in pairs),
            of_tokens=sum(map(len, made)),
            preemptions=result["preemptions"],
        )


def chats(given: argparse.Namespace, folder: Path) -> None:
    """Every turn is a new process: the chats' beginnings are what it may find."""
    connectors = {"plain": None, "kvdb": kvdb_in(folder / "store")}
    histories = [prose(4000 * chat, 300) for chat in range(10)]
    seconds: dict[str, list[float]] = {name: [] for name in connectors}
    cached = equal = 0
    for number in range(5):
        calls = [[{"prompt": history, "tokens": 16}] for history in histories]
        answers = {name: run(given, connector, calls=calls)["calls"] for name, connector in connectors.items()}
        for name, of in answers.items():
            seconds[name] += [one["first_s"] for (one,) in of]
        cached += sum(one["cached"] for (one,) in answers["kvdb"])
        equal += sum(one["tokens"] == other["tokens"] for (one,), (other,) in zip(*answers.values(), strict=True))
        histories = [
            history + one["tokens"] + prose(100_000 + 1000 * number + 90 * i, 60)
            for i, (history, (one,)) in enumerate(zip(histories, answers["plain"], strict=True))
        ]
    report(
        "vllm.chats",
        dtype=given.dtype,
        chats=10,
        turns=5,
        plain_first_s=median(seconds["plain"]),
        kvdb_first_s=median(seconds["kvdb"]),
        plain_later_s=median(seconds["plain"][10:]),
        kvdb_later_s=median(seconds["kvdb"][10:]),
        times_sooner_later=median(seconds["plain"][10:]) / median(seconds["kvdb"][10:]),
        cached=cached,
        tokens_equal=equal,
        answers=50,
    )


def kvdb_in(folder: Path, **options: str) -> Job:
    return {
        "kv_connector": "KvdbConnector",
        "kv_connector_module_path": "engine_adapter.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": str(folder), **options},
    }


def files_in(folder: Path) -> Job:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def prose(start: int, tokens: int) -> list[int]:
    """Tokens of a novel from about the token `start` on."""
    text = novels()[-1]
    begin = text.index(" ", 4 * start)
    ids = Tokenizer.from_file(f"{real_model_folder()}/tokenizer.json").encode(text[begin : begin + 8 * tokens]).ids
    return list(ids[:tokens])


def run(given: argparse.Namespace, connector: Job | None, **job: Any) -> Job:
    """What a new process of vLLM answers. Raises CalledProcessError, with the end of its log on stderr too, and RuntimeError if
    its threads are not those of every other."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "job.json"), Path(folder, "result.json")
        asked.write_text(json.dumps({"dtype": given.dtype, "connector": connector, **job}))
        command = [sys.executable, "-m", "benchmarks.vllm_process", str(asked), str(answered)]
        own = vllm_binding.environment() | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=PROCESS_S, check=False)
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
            done.check_returncode()
        result: Job = json.loads(answered.read_text())
        if result["binding"] != vllm_binding.wanted():
            raise RuntimeError(f"vLLM is bound as {result['binding']}; expected {vllm_binding.wanted()}, as every other")
        return result


FIGURES = {"first-token": first_token, "save-cost": save_cost, "prompts": prompts, "chats": chats}

if __name__ == "__main__":
    main()
