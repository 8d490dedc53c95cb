"""A database in this process, over random keys and values: store once, find by tokens, attend, fork, keep.

Run it: python examples/embedded.py
"""

import numpy as np

import kvdb

TOKENS, NEW = 4_000, 3
SPEC = kvdb.ModelSpec("random-model", layers=2, q_heads=8, kv_heads=2, head_dim=64, dtype="float32")


def main() -> None:
    random = np.random.default_rng(0)

    def draw(heads: int, tokens: int) -> np.ndarray:
        return random.standard_normal((heads, tokens, SPEC.head_dim), np.float32)

    document = list(range(TOKENS))
    prompt = [*document, 7, 8, 9]
    # One (k, v) a layer, [kv_heads, tokens, head_dim], keys after RoPE. A generator: one layer at a time is in memory.
    kv = ((draw(SPEC.kv_heads, TOKENS), draw(SPEC.kv_heads, TOKENS)) for _ in range(SPEC.layers))

    with kvdb.connect() as db:
        context = db.import_context(SPEC, document, kv, name="contract.pdf")
        print(f"stored {context.info.tokens:,} tokens in {context.info.nbytes:,} bytes")

        # A session stands on the longest stored prefix of its tokens; only what is behind it is left to compute.
        with db.create_session(SPEC, prompt) as session:
            print(f"{session.reused} of {len(prompt)} tokens need no prefill")
            for layer in range(SPEC.layers):
                q, k, v = draw(SPEC.q_heads, NEW), draw(SPEC.kv_heads, NEW), draw(SPEC.kv_heads, NEW)
                out = session.attend(layer, q, k, v)
            print("attention of the last layer:", out.shape)

            # A fork shares every block, and copies one only when it writes there.
            with session.fork() as twin:
                twin.attend(0, draw(SPEC.q_heads, 1), draw(SPEC.kv_heads, 1), draw(SPEC.kv_heads, 1))

            # What is stored already is not stored again: this keeps three tokens.
            db.store(session, name="turn-1", tokens=prompt)

        print("stored:", [kept.name for kept in db.contexts()])
        print(f"of a longer prompt {db.match(SPEC, [*prompt, 10]).tokens:,} tokens are found")


if __name__ == "__main__":
    main()
