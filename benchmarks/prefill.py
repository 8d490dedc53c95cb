"""What does a model's prefill take with kvdb under it, beside the same prefill without: storing a text, recomputing a blend?

    python -m benchmarks.prefill [--tokens 4096] [--dtypes float32 bfloat16] [--layers 6] [--rounds 3] [--threads 2]

SmolLM2-135M-Instruct (`make real-model`), or the demo's vault model without it, whose lengths are clipped to its positions. Every
round runs all in turns: transformers' own prefill with its default attention (`plain`), `engine.store` of the same tokens, and
the first token of a prompt of four chunks, all of whose tokens are recomputed (`blend`). `over_plain` is the ratio of the
medians, of time and of what it took of the processors; torch's threads spin where they wait, so on a busy machine the latter says
something with --threads 1 alone. --layers: only so many of the model's layers, for a shorter run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvdb
from benchmarks.harness import argument_parser, machine, report
from engine_adapter.models import vault
from engine_adapter.models.pretrained import NAME, real_model_folder
from engine_adapter.transformers import attach

CHUNKS, QUESTION_TOKENS = 4, 32
Seconds = tuple[float, float]
"""Seconds of the clock, and of all processors together."""


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    with kvdb.connect(threads=given.threads) as db:
        report("machine", **machine(), threads=given.threads)
        for dtype in given.dtypes:
            model, name = model_of(dtype, given.layers)
            tokens = min(given.tokens, model.config.max_position_embeddings - CHUNKS - QUESTION_TOKENS)
            measured(db, model, tokens, given.rounds, of=name, dtype=dtype, layers=model.config.num_hidden_layers)


def model_of(dtype: str, layers: int) -> tuple[PreTrainedModel, str]:
    """A model of random weights where only some of its layers are wanted, as its time does not depend on them."""
    folder = real_model_folder()
    kind = getattr(torch, dtype)
    if folder is None:
        return vault.load()[0].to(kind).eval(), "vault"
    if not layers:
        return LlamaForCausalLM.from_pretrained(folder, dtype=kind).eval(), NAME
    config = LlamaConfig.from_pretrained(folder)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    return LlamaForCausalLM._from_config(config, dtype=kind).eval(), NAME


def measured(db: kvdb.Client, model: PreTrainedModel, tokens: int, rounds: int, **said: object) -> None:
    """One line for each of what is compared."""
    ids = torch.randint(0, model.config.vocab_size, (tokens + QUESTION_TOKENS,), generator=torch.Generator().manual_seed(0))
    runs = runs_of(db, model, ids)
    seconds: dict[str, list[Seconds]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            taken = run()
            if number:
                seconds[name].append(taken)
    middle = {name: [median(values) for values in zip(*pairs, strict=True)] for name, pairs in seconds.items()}
    for name, (wall, processor) in middle.items():
        plain_wall, plain_processor = middle["plain"]
        report(
            f"prefill.{name}",
            **said,
            tokens=tokens,
            s=wall,
            processor_s=processor,
            over_plain=wall / plain_wall,
            processor_over_plain=processor / plain_processor,
        )
    for number in range(CHUNKS):
        db.drop(f"chunk {number}")


def timed(run: Callable[[], object]) -> Seconds:
    begin, spent = perf_counter(), process_time()
    run()
    return perf_counter() - begin, process_time() - spent


def runs_of(db: kvdb.Client, model: PreTrainedModel, ids: torch.Tensor) -> dict[str, Callable[[], Seconds]]:
    """What is compared. Attaching, which looks at all weights, is not timed."""
    text, question = ids[:-QUESTION_TOKENS], ids[-QUESTION_TOKENS:]

    def plain() -> Seconds:
        with torch.no_grad():
            return timed(lambda: model.get_decoder()(input_ids=text[None], past_key_values=DynamicCache(), use_cache=True))

    def store() -> Seconds:
        with attach(model, db) as engine:
            taken = timed(lambda: engine.store(name="text", input_ids=text))
        db.drop("text")
        return taken

    with attach(model, db) as engine:
        for number, chunk in enumerate(text.chunk(CHUNKS)):
            engine.store_chunk(name=f"chunk {number}", input_ids=chunk)
    parts = [*(f"chunk {number}" for number in range(CHUNKS)), question]

    def blend() -> Seconds:
        with attach(model, db) as engine:
            return timed(lambda: engine.generate(parts=parts, recompute=1.0, max_new_tokens=1, do_sample=False))

    return {"plain": plain, "store": store, "blend": blend}


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=0, help="how many of the model's layers, 0 for all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of torch and of kvdb (default 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
