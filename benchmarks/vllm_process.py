"""One process of vLLM over the pretrained model, for `benchmarks.vllm`: python -m benchmarks.vllm_process JOB.json RESULT.json.

JOB: dtype, connector (the value of vLLM's `kv_transfer_config`, or null), options (of `vllm.LLM`), and what to do: `calls`, lists
of requests that run together, each with prompt (token ids), tokens (new ones), and perhaps cancel (after how many steps); or
`turns`, lists of prompts that are asked one after the other, with kvdb's saves in every second turn.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from benchmarks import vllm_binding
from engine_adapter.models.pretrained import real_model_folder

WARM_UP = list(range(1000, 1064))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    began = time.perf_counter()
    options = {"enforce_eager": True, "max_model_len": 8192, "disable_log_stats": False} | job.get("options", {})
    if job["connector"] is not None:
        options["kv_transfer_config"] = job["connector"]
    llm = LLM(str(real_model_folder()), dtype=job["dtype"], **options)
    ask(llm, [{"prompt": WARM_UP, "tokens": 2}])
    result: dict[str, Any] = {"start_s": time.perf_counter() - began}
    if "turns" in job:
        result["turns"] = [turn(llm, prompts, number % 2 == 1) for number, prompts in enumerate(job["turns"])]
    else:
        result["calls"] = [ask(llm, requests) for requests in job["calls"]]
    result["preemptions"] = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    result["binding"] = vllm_binding.seen()
    Path(sys.argv[2]).write_text(json.dumps(result))


def ask(llm: LLM, requests: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """What requests that run together answer: tokens, cached (of the prompt), first_s (until the first token), all_s. None for
    those that were cancelled."""
    engine = llm.llm_engine
    names = [f"{time.monotonic_ns()} {i}" for i in range(len(requests))]
    begin = time.perf_counter()
    for name, request in zip(names, requests, strict=True):
        params = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
    first: dict[str, float] = {}
    answers: dict[str, dict[str, Any] | None] = dict.fromkeys(names)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            name, (answer,) = output.request_id, output.outputs
            if answer.token_ids:
                first.setdefault(name, time.perf_counter() - begin)
            if output.finished and answer.finish_reason != "abort":
                answers[name] = {
                    "tokens": list(answer.token_ids),
                    "cached": output.num_cached_tokens,
                    "first_s": first[name],
                    "all_s": time.perf_counter() - begin,
                }
        steps += 1
        engine.abort_request([name for name, request in zip(names, requests, strict=True) if request.get("cancel") == steps])
    return [answers[name] for name in names]


def turn(llm: LLM, prompts: list[list[int]], saving: bool) -> dict[str, float]:
    """The seconds of requests one after the other, and those until what is saved of them is on disk too; or without saves."""
    connector = get_kv_transfer_group()
    saves = connector._saves
    if not saving:
        connector._saves = None
    try:
        begin = time.perf_counter()
        for prompt in prompts:
            ask(llm, [{"prompt": prompt, "tokens": 16}])
        answered = time.perf_counter()
        if saving:
            saves.wait()
        return {"requests_s": answered - begin, "stored_s": time.perf_counter() - begin}
    finally:
        connector._saves = saves


if __name__ == "__main__":
    main()
