"""kvdb: the database for the KV cache of long-context language models.

db = kvdb.connect()
db.import_context(spec, tokens, kv, name="contract.pdf")
with db.create_session(spec, tokens) as session:
    out = session.attend(layer, q, k, v)
"""

from indexes.retrieval import Dipr, Exact, TopK, TopP
from kvdb import errors
from kvdb.blend.controller import Choice
from kvdb.blend.strategies import Recompute
from kvdb.client.client import Client
from kvdb.client.connect import connect
from kvdb.client.context import Context
from kvdb.client.session import Session
from kvdb.config import Config, Timeouts, Tls
from kvdb.errors import KvdbError
from kvdb.types import (
    Attention,
    ContextInfo,
    ContextStatistics,
    Indexer,
    IndexInfo,
    ModelSpec,
    Placed,
    PrefixMatch,
    PromptPart,
    Rope,
    SegmentStatistics,
    SessionStats,
    Shares,
    State,
    TierStats,
)
from kvdb.version import __version__ as __version__
from query_optimizer.plan import Plan
from query_optimizer.query_options import Hints, QueryOptions

__all__ = [
    "Attention",
    "Choice",
    "Client",
    "Config",
    "Context",
    "ContextInfo",
    "ContextStatistics",
    "Dipr",
    "Exact",
    "Hints",
    "IndexInfo",
    "Indexer",
    "KvdbError",
    "ModelSpec",
    "Placed",
    "Plan",
    "PrefixMatch",
    "PromptPart",
    "QueryOptions",
    "Recompute",
    "Rope",
    "SegmentStatistics",
    "Session",
    "SessionStats",
    "Shares",
    "State",
    "TierStats",
    "Timeouts",
    "Tls",
    "TopK",
    "TopP",
    "connect",
    "errors",
]
