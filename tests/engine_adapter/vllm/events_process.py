"""A process with vLLM that writes, as JSON, the events of a save and of a load that misses: python -m ...events_process."""

import json
import sys

import numpy as np

from engine_adapter.vllm.events import events_of
from engine_adapter.vllm.journal import Changes
from engine_adapter.vllm.requests import Transfer


def main():
    tokens = np.arange(40, dtype=np.int32)
    stored = Transfer("r", tokens, "", 20, 40, (7, 3, 9), hashes=(11, 12))
    missing = Transfer("s", tokens[:32], "", 0, 32, (7, 3), hashes=(11, 12))
    partial = Transfer("t", tokens, "", 33, 40, (7, 3, 9), hashes=(11, 12))
    added, removed = events_of(Changes((stored, partial), (missing,)), 16).aggregate().get_all_events()
    nothing = events_of(Changes((partial,), ()), 16)
    sys.stdout.write(
        json.dumps(
            {
                "added": [added.block_hashes, added.parent_block_hash, added.token_ids, added.block_size, added.medium],
                "removed": [removed.block_hashes, removed.medium],
                "nothing": nothing,
            }
        )
    )


if __name__ == "__main__":
    main()
