"""A transformers model over a store on disk: a document is prefilled once, and found again after a restart.

Run it: python examples/transformers_store.py [FOLDER]
It wants pip install 'kvdb[demo]', or a clone; the model is the small one of the demo, which looks codes up in a long text.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

import kvdb
from engine_adapter.models import vault
from engine_adapter.transformers import attach

TOKENS = 1_024


def main(folder: Path) -> None:
    model, tokenizer = vault.load()
    document = vault.document(tokenizer, TOKENS, facts=3, seed=0)

    # The first process: prefill, and every block is on the disk when the call returns.
    with kvdb.connect(str(folder)) as db, attach(model, db) as engine:
        begun = time.perf_counter()
        engine.store(name="handbook", input_ids=torch.tensor([document.ids]))
        print(f"prefilled and stored {TOKENS:,} tokens in {time.perf_counter() - begun:.2f} s")

    # The next one, as after a restart: a prompt that begins with the document finds it by its token ids.
    with kvdb.connect(str(folder)) as db, attach(model, db) as engine:
        for fact in document.facts:
            asked = tokenizer.encode(fact.question, add_special_tokens=False)
            prompt = torch.tensor([[*document.ids, *asked]])
            begun = time.perf_counter()
            out = engine.generate(prompt, max_new_tokens=vault.CODE_DIGITS, do_sample=False)
            seconds = time.perf_counter() - begun
            answer = tokenizer.decode(out[0, prompt.shape[1] :])
            verdict = "right" if fact.answered_by(answer) else "wrong"
            print(f"{fact.question.strip()}? {answer.strip()} ({verdict}, {seconds:.2f} s)")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary) / "store")
