"""error_max and EXPLAIN: what a query may err by, why it was answered as it was, and how wrong it really is.

Run it: python examples/error_budget.py
"""

import numpy as np

import kvdb

TOKENS = 16_000
SPEC = kvdb.ModelSpec("random-model", layers=1, q_heads=4, kv_heads=2, head_dim=64, dtype="float32")


def relative_error(out: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


def main() -> None:
    random = np.random.default_rng(0)
    kv = random.standard_normal((2, SPEC.kv_heads, TOKENS, SPEC.head_dim), np.float32)
    # Each query looks for one key of its group: such heads are sharp, and need few tokens.
    wanted = random.integers(500, TOKENS - 500, 400)
    queries = [3 * kv[0, :, [token]].transpose(1, 0, 2).repeat(2, axis=0) for token in wanted]

    with kvdb.connect() as db:
        db.import_context(SPEC, range(TOKENS), [kv], name="doc")
        db.build_index("doc", "flat")

        with db.create_session(SPEC, range(TOKENS), error_max=0.02) as session:
            # A query that names nothing is exact until audits on its own heads have proven a faster way.
            exact = session.attention(0, queries[0], error_max=0)
            print(f"before any proof the error is {relative_error(session.attention(0, queries[0]), exact):.1e}")
            for q in queries:
                session.attention(0, q)
            worst = max(relative_error(session.attention(0, q), session.attention(0, q, error_max=0)) for q in queries[:20])
            print(f"after {len(queries)} queries it is at most {worst:.1e} of 20; 2e-02 were allowed")

            # One that names a retrieval gets literally that, and no promise of its error.
            named = session.attention(0, queries[0], retrieval=kvdb.Dipr(0.012))
            print(f"Dipr(0.012), as asked for, errs by {relative_error(named, exact):.1e}\n")

            print(session.explain(0, analyze=True))  # the plan, carried out and compared with exact attention
            print(f"{session.stats().error_audits} audits, their median error {session.stats().error_median:.1e}")


if __name__ == "__main__":
    main()
