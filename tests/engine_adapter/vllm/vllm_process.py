"""A process of vLLM over a model: python -m tests.engine_adapter.vllm.vllm_process CALLS RESULTS.

CALLS is a JSON file of the model's folder, the target of kvdb or null, options of `vllm.LLM`, which read of a layer's KV fails
(0: none), `extra` settings of the connector, at which attended layer the database goes (0: never), the version that vLLM says
it has or null for its own, and calls: lists of requests that run together, each with prompt, tokens, and perhaps salt, extra
(arguments of its sampling) and cancel (after how many steps). RESULTS lists for each call what its requests answered, a pair of
the new tokens and of how many tokens of the prompt were cached, or None for one that was cancelled, and what came of blending
each; and it says how often vLLM preempted, how many rows of layers kvdb answered, with which retrievals by the plans of the first
row's first layer, of what classes the layers' attention is, and the metrics of kvdb.
"""

import json
import sys
from itertools import count
from pathlib import Path

import vllm
from vllm import LLM, SamplingParams

import kvdb
from engine_adapter.vllm.answers import Answers
from kvdb.errors import Unavailable


def connector(target, extra):
    return {
        "kv_connector": "KvdbConnector",
        "kv_connector_module_path": "engine_adapter.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": target, **extra},
    }


def fail(number):
    """Let one read of a session in this process fail, as if its server went."""
    read, calls = kvdb.Session.read, count(1)

    def once(session, *arguments, **keywords):
        if next(calls) == number:
            raise Unavailable("the server went")
        return read(session, *arguments, **keywords)

    kvdb.Session.read = once


class Counted:
    """The rows that kvdb answers, one for each layer. gone_at: the call at which the database goes, 0 for never."""

    def __init__(self, gone_at):
        self.rows = 0
        self.retrievals = set()
        attend, calls = Answers.attend, count(1)

        def counted(answers, layer, q, k, v):
            if next(calls) == gone_at:
                answers._contexts.db.close()
            out = attend(answers, layer, q, k, v)
            if out is not None:
                self.rows += len(q)
                if layer == 0:
                    plan = next(iter(answers.sessions().values())).explain(0, options=answers._options.query)
                    self.retrievals.add(str(plan.retrieval))
            return out

        Answers.attend = counted


def run(engine, number, requests):
    """Run the requests of a call together, and give what they answer."""
    names = [f"{number}-{i}" for i in range(len(requests))]
    for name, request in zip(names, requests, strict=True):
        prompt = {"prompt_token_ids": request["prompt"]} | ({"cache_salt": request["salt"]} if "salt" in request else {})
        given = {"temperature": 0, "max_tokens": request["tokens"], "ignore_eos": True, "extra_args": request.get("extra")}
        engine.add_request(name, prompt, SamplingParams(**given))
    answers, results = dict.fromkeys(names), dict.fromkeys(names)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                answers[output.request_id] = [list(output.outputs[0].token_ids), output.num_cached_tokens]
                results[output.request_id] = (output.kv_transfer_params or {}).get("kvdb_blend")
        steps += 1
        engine.abort_request([name for name, request in zip(names, requests, strict=True) if request.get("cancel") == steps])
    return list(answers.values()), list(results.values())


def main():
    given = json.loads(Path(sys.argv[1]).read_text())
    options = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "disable_log_stats": False} | given["options"]
    if given["target"]:
        options["kv_transfer_config"] = connector(given["target"], given["extra"])
    if given["failing_read"]:
        fail(given["failing_read"])
    if given["version"]:
        vllm.__version__ = given["version"]
    counted = Counted(given["gone_at"])
    llm = LLM(given["model"], **options)
    done = [run(llm.llm_engine, number, requests) for number, requests in enumerate(given["calls"])]
    calls, blends = ([each[i] for each in done] for i in (0, 1))
    preemptions = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    implementations = sorted({type(layer.impl).__name__ for layer in layers})
    results = {
        "calls": calls,
        "blends": blends,
        "preemptions": preemptions,
        "answered": counted.rows,
        "retrievals": sorted(counted.retrievals),
    }
    results["implementations"] = implementations
    metrics = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith("vllm:kvdb_")}
    results["metrics"] = {name: getattr(metric, "sum", None) or getattr(metric, "value", 0) for name, metric in metrics.items()}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
