"""The public API, pinned: a change here is one that users see, and belongs in the changelog."""

import inspect
import re
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path

import kvdb

ROOT = Path(__file__).parents[2]

API = """
Attention(q_heads, kv_heads, key_dim, value_dim=None, rope=None, scale=None, window=None, sinks=False, values='own', indexer=None)
Attention.width_of_values
Attention.plain
Attention.text
Choice(ratio, tier, load_seconds, recompute_seconds, seconds, hidden, floor, by_caller, reason)
Choice.to_dict()
Choice.from_dict(values)
Client(transport)
Client.last_timings
Client.import_context(spec, tokens, kv, *, name, queries=None, states=None, salt='', timeout=None, **retention)
Client.import_chunk(spec, tokens, kv, *, name, base=0, queries=None, salt='', timeout=None, **retention)
Client.create_session(spec, tokens=None, *, parts=None, error_max=None, salt='', share=False, label='', expected_tokens=None, timeout=None)
Client.name_chunk(spec, tokens, *, name, salt='', timeout=None, **retention)
Client.attend(sessions, layer, q, k, v, *, starts=None, timeout=None, options=None, **keywords)
Client.attention(sessions, layer, q, *, timeout=None, options=None, **keywords)
Client.store(session, *, name, tokens=None, chunk=False, timeout=None, **retention)
Client.close()
Client.contexts(prefix='', *, metadata=None, limit=None, after='', timeout=None)
Client.pin(*names, timeout=None)
Client.unpin(*names, timeout=None)
Client.update(name, *, pinned=None, ttl=None, metadata=None, shared_with=None, timeout=None)
Client.rename(name, new, *, timeout=None)
Client.match(spec, tokens, *, salt='', timeout=None)
Client.get(name, *, timeout=None)
Client.drop(*names, timeout=None)
Client.drop_all(prefix='', *, metadata=None, timeout=None)
Client.offload(name, *, timeout=None)
Client.build_index(name, kind='flat', *, wait=True, timeout=None)
Client.indexes(name, *, timeout=None)
Client.verify(name, *, timeout=None)
Client.verify_store(*, timeout=None)
Client.unknown_files(*, remove=False, timeout=None)
Client.compact(*, timeout=None)
Client.status(*, timeout=None)
Client.space(*, timeout=None)
Client.backup(folder, *, link=False, timeout=None)
Client.explain(name, layer=None, *, analyze=False, timeout=None, options=None, **keywords)
Client.sessions(*, timeout=None)
Client.explain_session(label, layer=None, *, analyze=False, timeout=None, options=None, **keywords)
Client.tiers(*, timeout=None)
Client.statistics(name, *, timeout=None)
Client.create_sessions(spec, prompts, *, error_max=None, salt='', expected_tokens=None, timeout=None)
Client.update_sessions(sessions, layer, k, v, *, starts=None, timeout=None)
Client.truncate_sessions(sessions, tokens, *, timeout=None)
Client.close_sessions(sessions, *, timeout=None)
Config(storage=<factory>, cpu=<factory>, optimizer=<factory>, window=<factory>, indexes=<factory>, server=<factory>, quotas=<factory>, metrics=<factory>, log=<factory>)
Context(transport, info)
Context.name
Context.spec
Context.tokens
Context.token_ids(*, timeout=None)
Context.read(layers, start=0, stop=None, *, out=None, timeout=None)
Context.create_session(tokens, *, spec=None, error_max=None, expected_tokens=None, timeout=None)
Context.drop(*, timeout=None)
Context.close()
ContextInfo(name, spec, tokens, segments, nbytes, chunk=False, blended=False, salt='', exact=True, pinned=False, expires=None, metadata=<factory>, created=0.0, used=0.0, uses=0, format='', key_error=0.0, value_error=0.0, resident=True, shared_with=())
ContextStatistics(name, segments)
Dipr(alpha=0.012)
Dipr.beta(scale)
Exact()
Hints(index=None, rules_off=(), memory_budget=None)
IndexInfo(segment, tokens, kind, layers, layers_total, nbytes, state='ready', progress=1.0, seconds=0.0, seconds_expected=0.0, error='')
Indexer(heads, dim, top)
KvdbError
ModelSpec(name, layers, q_heads=None, kv_heads=None, head_dim=None, dtype='bfloat16', rope=None, fingerprint='', scale=None)
ModelSpec.uniform
ModelSpec.all_layers
ModelSpec.groups
ModelSpec.kept
ModelSpec.places
ModelSpec.attending
ModelSpec.has_states
ModelSpec.indexer_places
ModelSpec.shape(place)
ModelSpec.softmax_scale
ModelSpec.numpy_dtype
ModelSpec.token_nbytes
ModelSpec.tokens_nbytes
ModelSpec.digest
ModelSpec.to_dict()
ModelSpec.from_dict(values)
ModelSpec.shapes
Placed(begin, end, kind)
Placed.tokens
Plan(layer, retrieval, retrieval_given, accesses, estimate, tokens_min, tokens_end, wishes=(), notes=(), actual=None, outcome=None, settled=False)
Plan.rule
Plan.searches
Plan.gave_up
Plan.holds_for(tokens)
Plan.to_dict()
Plan.from_dict(values)
Plan.explain(verbose=False)
PrefixMatch(tokens, resident)
PromptPart(source, visible=None, at=None)
QueryOptions(retrieval=None, max_missed_mass=None, estimate_tail=False, hints='Hints', error_max=None)
QueryOptions.budgeted
QueryOptions.with_default(error_max)
Recompute(ratio=None, error_max=0.03, floor=0.0, steepness=0.3, check_layer=1, strategy=None)
Recompute.of(given)
Recompute.share
Rope(theta=10000.0, rotary_dims=None, layout='half', scaling=())
SegmentStatistics(segment, tokens, queries, retrieved, dense, sharpness, window_hits, audits, error)
SegmentStatistics.at(places)
Session(transport, timeout=None)
Session.spec
Session.reused
Session.start
Session.error_max
Session.tokens
Session.layout
Session.update(layer, k, v, *, start=None, timeout=None)
Session.update_indexer(layer, keys, *, start=None, timeout=None)
Session.read_indexer(layer, start=0, stop=None, *, timeout=None)
Session.state(layer, position=None, *, timeout=None)
Session.put_state(layer, arrays, position=None, *, timeout=None)
Session.put_sinks(layer, sinks, *, timeout=None)
Session.plan_recompute(*, seconds=None, floor=0.15, ratio=None, timeout=None)
Session.overlay(layer, positions, k, v, *, timeout=None)
Session.deviation(layer, positions, k, v, *, score=None, timeout=None)
Session.attention(layer, q, *, positions=None, timeout=None, options=None, **keywords)
Session.attend(layer, q, k, v, *, start=None, timeout=None, options=None, **keywords)
Session.attend_selected(layer, q, k, v, index_q, index_weights, *, start=None, timeout=None)
Session.truncate(tokens, *, timeout=None)
Session.read(layers, start=0, stop=None, *, out=None, timeout=None)
Session.fork(*, timeout=None)
Session.store(name, tokens=None, *, chunk=False, timeout=None, **retention)
Session.explain(layer, *, analyze=False, timeout=None, options=None, **keywords)
Session.stats(*, timeout=None)
Session.close()
SessionStats(tokens, reused, tail_tokens, tail_nbytes, queries, tokens_scanned, tokens_retrieved, bytes_read, kernel_seconds, missed_mass, missed_mass_bound, missed_mass_bound_max, rules=<factory>, error_audits=0, error_median=0.0, error_p95=0.0, error_max_seen=0.0, ways=<factory>)
Shares(layer)
Shares.text
State(arrays)
State.by_name
State.text
TierStats(name, blocks_used, blocks_total, block_nbytes, nbytes, huge, pinned_nbytes=0)
Timeouts(lookup=10.0, attend=30.0, progress=30.0, store=300.0, maintain=3600.0)
Timeouts.of(given)
Tls(ca='', cert='', key='')
Tls.of_environment()
Tls.read()
TopK(k)
TopP(p)
connect(target=None, *, token='', timeout=None, tls=None, config=None, threads=None, rules=())
errors
"""  # noqa: E501  # a signature is a line

ERRORS = """
KvdbError(Exception)
InvalidArgument(KvdbError, ValueError)
ShapeError(InvalidArgument)
DtypeError(InvalidArgument)
LayerError(InvalidArgument)
NonFiniteError(InvalidArgument)
SpecError(InvalidArgument)
ConfigError(InvalidArgument)
PositionError(KvdbError)
SpecMismatch(KvdbError)
SessionClosed(KvdbError)
ForkedProcess(KvdbError)
NotFound(KvdbError, LookupError)
AlreadyExists(KvdbError)
CapacityError(KvdbError)
MessageTooLarge(CapacityError)
QuotaExceeded(CapacityError)
Unauthenticated(KvdbError)
PermissionDenied(KvdbError)
Unsupported(KvdbError)
Unavailable(KvdbError, ConnectionError)
DeadlineExceeded(Unavailable, TimeoutError)
Cancelled(KvdbError)
GpuLost(KvdbError)
IntegrityError(KvdbError)
InternalError(KvdbError)
"""


def test_the_names_and_signatures_are_these():
    assert [line for name in kvdb.__all__ for line in describe(name, getattr(kvdb, name))] == API.split("\n")[1:-1]


def test_every_name_exported_is_there_and_sorted():
    assert kvdb.__all__ == sorted(kvdb.__all__)
    assert set(kvdb.__all__) <= set(dir(kvdb))


def test_the_errors_are_these():
    classes = [value for value in vars(kvdb.errors).values() if inspect.isclass(value)]
    assert [f"{c.__name__}({', '.join(b.__name__ for b in c.__bases__)})" for c in classes] == ERRORS.split("\n")[1:-1]


def test_the_version_is_one():
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest, "CHANGELOG.md has no entry such as `## 0.1.0`"
    assert kvdb.__version__ == version("kvdb") == newest[1]


def describe(name, value):
    """A public name as lines: a class with its own public attributes, anything else that can be called with its parameters."""
    if not inspect.isclass(value):
        return [name + (parameters(value) if callable(value) else "")]
    members = [(member, found) for cls in value.__mro__[-2::-1] if own(cls) for member, found in vars(cls).items()]
    fields = getattr(value, "__dataclass_fields__", {})
    lines = [
        f"{name}.{member}" + (parameters(found) if callable(found) else "")
        for member, found in ((m, f.__func__ if isinstance(f, classmethod) else f) for m, f in members)
        if not member.startswith("_") and member not in fields
    ]
    return [name + ("" if issubclass(value, Exception) else parameters(value)), *lines]


def own(cls):
    return cls.__module__.partition(".")[0] in {"kvdb", "query_optimizer", "indexes"}


def parameters(function):
    """`(a, *, b=None)`: names and defaults, which callers rely on; mypy looks after the annotations."""
    signature = inspect.signature(function)
    plain = [
        p.replace(annotation=p.empty, default=type(p.default).__name__ if is_dataclass(p.default) else p.default)
        for p in signature.parameters.values()
        if p.name not in {"self", "cls"}
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
