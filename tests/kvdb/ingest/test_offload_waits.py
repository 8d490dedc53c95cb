"""What is offloaded stays out of memory: compaction in the background ends first, which would bring it back."""

import threading

import numpy as np

from tests.stores import connect, holds, put

DOC = np.arange(64)


def test_offloading_waits_for_a_compaction_of_the_background(tmp_path):
    with connect(tmp_path, block_size=32) as db:
        engine = db._transport
        put(db, DOC[:40], "short")
        engine._compactor.wait()
        with engine._compactor._turn:  # the compaction that the next context asks for waits here
            put(db, DOC, "long")
            offloading = threading.Thread(target=db.offload, args=("long",))
            offloading.start()
            offloading.join(0.05)
            assert offloading.is_alive()
        offloading.join(20)
        assert not db.get("long").info.resident
        assert db.get("long").info.segments == 1
        assert not any(tier.blocks_used for tier in db.tiers() if tier.name == "cpu")
        assert holds(db, DOC)
