"""Block tables hold what was appended, whoever shares their blocks."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvdb.errors import NonFiniteError
from kvdb.storage.block_layout import BlockLayout
from kvdb.storage.block_table import BlockTable
from kvdb.storage.budget import CpuBudget
from kvdb.storage.cpu import CpuTier
from kvdb.types import DTYPES

LAYOUT = BlockLayout("float32", kv_heads=2, head_dim=8, block_size=4)


def tokens(n, first):
    """k and v that tell which token they are of."""
    k = np.broadcast_to(np.arange(first, first + n, dtype=np.float32)[:, None], (2, n, 8)).copy()
    return k, -k


class Tables(RuleBasedStateMachine):
    """Tables are appended to, shared, cut and released in any order; a list of numbers stands for each."""

    def __init__(self):
        super().__init__()
        self.tier = CpuTier(LAYOUT.nbytes, 1 << 20, CpuBudget(None))
        self.tables = [(BlockTable(self.tier, LAYOUT), [])]
        self.next = 1

    @rule(n=st.integers(0, 11), data=st.data())
    def append(self, n, data):
        table, held = data.draw(st.sampled_from(self.tables))
        table.append(*tokens(n, self.next))
        held += range(self.next, self.next + n)
        self.next += n

    @rule(n=st.integers(1, 11), data=st.data())
    def append_poison(self, n, data):
        table, _ = data.draw(st.sampled_from(self.tables))
        k, v = tokens(n, self.next)
        v[1, data.draw(st.integers(0, n - 1)), 3] = np.inf
        with pytest.raises(NonFiniteError):
            table.append(k, v)

    @rule(data=st.data())
    def truncate(self, data):
        table, held = data.draw(st.sampled_from(self.tables))
        length = data.draw(st.integers(0, len(held)))
        table.truncate(length)
        del held[length:]

    @rule(data=st.data())
    def share(self, data):
        table, held = data.draw(st.sampled_from(self.tables))
        self.tables.append((table.share(), list(held)))

    @rule(data=st.data())
    def cut(self, data):
        table, held = data.draw(st.sampled_from(self.tables))
        start = data.draw(st.integers(0, len(held)))
        self.tables.append((table.suffix(start), held[start:]))

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def release(self, data):
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        table.release()

    @invariant()
    def every_table_holds_its_tokens(self):
        for table, held in self.tables:
            k, v = table.read(0, table.length)
            assert (k == np.array(held, np.float32)[None, :, None]).all()
            assert (v == -k).all()
            assert len(table.blocks) == LAYOUT.blocks_for(len(held))

    @invariant()
    def every_block_has_its_owners(self):
        self.tier.check_integrity([table.blocks for table, _ in self.tables])

    def teardown(self):
        self.tier.close()


TestTables = Tables.TestCase


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_strides_are_taken(dtype):
    layout = BlockLayout(dtype, kv_heads=3, head_dim=16, block_size=8)
    tier = CpuTier(layout.nbytes, 1 << 20, CpuBudget(None))
    table = BlockTable(tier, layout)
    numbers = np.random.default_rng(0).integers(-99, 99, (20, 3, 16))
    k = numbers.astype(DTYPES[dtype]).transpose(1, 0, 2)  # as an engine that keeps [token, head, dim]
    v = np.asarray(k.transpose(0, 2, 1), order="C").transpose(0, 2, 1)  # even the last dimension is strided
    table.append(k, v)
    assert (np.stack(table.read(0, 20)) == np.stack([k, v])).all()
    table.release()
    tier.check_integrity([])
    tier.close()
