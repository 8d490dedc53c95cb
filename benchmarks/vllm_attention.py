"""What does a token take in vLLM when kvdb answers the attention, beside vLLM's own kernel? In turns, within one process.

Needs vLLM, so it runs by vLLM's own Python: .venv-vllm/bin/python -m benchmarks.vllm_attention TARGET.
The first run computes the prompt, which takes minutes, and stores it under the target; others load it.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks import vllm_binding
from benchmarks.harness import argument_parser, machine, report

os.environ |= vllm_binding.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}

from tokenizers import Tokenizer
from vllm import LLM, SamplingParams

from engine_adapter.models.pretrained import novels, real_model_folder
from engine_adapter.vllm import plugin

if TYPE_CHECKING:
    from collections.abc import Sequence


TURN = 10
"""Steps of a turn. The first is not counted: kvdb takes the tokens of vLLM's turn out of its blocks there."""
STEPS = 180


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("target", help="what kvdb.connect takes")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=1, help="requests of a step, which share the prompt but for its end")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--attention", type=json.loads, default={"retrieval": "exact"}, help="as in the connector's configuration"
    )
    given = parser.parse_args()
    plugin.register()
    llm = opened(given.target, given.dtype, {"from_tokens": given.tokens // 2, **given.attention})
    attentions = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    impls = [attention.impl for attention in attentions]
    answers = impls[0]._answers
    prompts = [prompt_of(given.tokens, row) for row in range(given.rows)]

    def turn_to(*, kvdb: bool) -> None:
        for number, impl in enumerate(impls):
            impl.answer_with(answers if kvdb else None, number)

    decode(llm, prompts, 4)  # store them, or warm up
    turn_to(kvdb=False)
    own, _ = decode(llm, prompts, STEPS)
    turn_to(kvdb=True)
    all_kvdb, _ = decode(llm, prompts, STEPS)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    steps = iter(range(STEPS))

    def next_turn() -> None:
        turn_to(kvdb=next(steps) // TURN % 2 == 0)

    in_turns, taken = decode(llm, prompts, STEPS, next_turn)
    for step, took in enumerate(taken):
        if step % TURN and step > 2 * TURN:
            seconds[step // TURN % 2 == 0].append(took)
    medians = {kvdb: statistics.median(values) for kvdb, values in seconds.items()}
    report(
        "vllm_attention",
        **machine(),
        binding=vllm_binding.seen(),
        tokens=given.tokens,
        rows=given.rows,
        dtype=given.dtype,
        attention=given.attention,
        target=given.target.partition("://")[0] if "://" in given.target else "folder",
        vllm_ms=1e3 * medians[False],
        kvdb_ms=1e3 * medians[True],
        ratio=medians[True] / medians[False],
        steps=len(seconds[True]),
        tokens_equal=[same(own, all_kvdb), same(own, in_turns)],
    )


def opened(target: str, dtype: str, attention: dict[str, Any]) -> LLM:
    """vLLM over the pretrained model, with kvdb behind it."""
    return LLM(
        str(real_model_folder()),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=8192,
        kv_transfer_config={
            "kv_connector": "KvdbConnector",
            "kv_connector_module_path": "engine_adapter.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"target": target, "attention": attention},
        },
    )


def prompt_of(tokens: int, row: int) -> list[int]:
    """Prose of a novel; rows differ in their last 32 tokens."""
    encode = Tokenizer.from_file(f"{real_model_folder()}/tokenizer.json").encode
    ids = encode(novels()[-1][: 8 * tokens]).ids
    return ids[: tokens - 32] + ids[tokens + 32 * row : tokens + 32 * (row + 1)]


def decode(llm: LLM, prompts: Sequence[list[int]], steps: int, before: Any = lambda: None) -> tuple[list[list[int]], list[float]]:
    """The new tokens of each prompt, and the seconds of every step in which all of them are decoded. before: called ahead of each
    of these."""
    engine = llm.llm_engine
    for row, prompt in enumerate(prompts):
        engine.add_request(
            f"{time.monotonic_ns()} {row}",
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True),
        )
    answers, seconds, decoding = {}, [], 0
    while engine.has_unfinished_requests():
        whole = decoding == len(prompts)
        if whole:
            before()
        begin = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - begin
        if whole:
            seconds.append(took)
        decoding = sum(len(output.outputs[0].token_ids) > 0 for output in outputs)
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return [answers[name] for name in sorted(answers, key=lambda name: int(name.split()[1]))], seconds


def same(first: list[list[int]], second: list[list[int]]) -> float:
    """The share of tokens before the first that differs, 1 where all are equal."""
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(first, second, strict=True)]
    return statistics.mean(next((i for i, (a, b) in enumerate(row) if a != b), len(row)) / len(row) for row in pairs)


if __name__ == "__main__":
    main()
