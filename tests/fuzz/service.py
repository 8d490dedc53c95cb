"""Fuzz every call of the service, made from its descriptors, while another tenant's data lies beside.

    python -m tests.fuzz.service [--seconds 30] [--seed N] [--admin] [--store]

Whatever comes in, each call ends in time with a status that says whose fault it is; what it is told holds nothing of another
tenant's; and afterwards the server answers right calls, and holds nothing that nobody owns. A finding says its seed and case.
`--admin`: the calls bring an admin's token, who may see and drop what all have. `--store`: the server keeps a store.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np
from google.protobuf.descriptor import MethodDescriptor

import kvdb
from kvdb.config import Config, ServerConfig, StorageConfig
from kvdb.database import Database
from kvdb.rpc import codec
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.call import SERVICE
from kvdb.server.serve import Server
from kvdb.server.tenancy.tokens_file import new_token
from kvdb.types import ModelSpec
from tests.database import database
from tests.fuzz.messages import Messages

SPEC = ModelSpec("tiny", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
TOKENS = np.arange(40, dtype=np.int32)
SECRET_TOKENS = np.arange(0x5EC00000, 0x5EC00000 + 40, dtype=np.int32)
SECRET_VALUE = np.float32(7.31415926)
THEIRS = "theirs"
MARK = "mark-of-the-other-tenant"
"""Stands in what the other tenant noted, and in no request of the fuzzed one; the name THEIRS does."""
CALL_SECONDS_MAX = 20
CHECK_EVERY = 100
STREAM_MESSAGES_MAX = 6
SESSIONS_MAX = 12
BUGS = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAUTHENTICATED,
}
UNSAFE = {"Backup"}
"""What an admin may do to the host's files; random names are no test of it."""
SECRETS = (MARK.encode(), SECRET_TOKENS[:2].tobytes(), np.full(4, SECRET_VALUE).tobytes())


class Finding(AssertionError):
    """What the service may not do."""


class Fuzzed:
    """A server with two tenants, of which one sends anything."""

    def __init__(self, server: Server, engine: Database, tokens: dict[str, str], seed: int, *, admin: bool = False) -> None:
        self.server = server
        self.engine = engine
        self.seed = seed
        self.admin = admin
        self.methods = [method for method in SERVICE.methods if not (admin and method.name in UNSAFE)]
        self.tokens = tokens
        self.calls = 0
        self.codes: dict[str, int] = {}
        self.answered: set[str] = set()
        """Methods that answered at least once, so that what stands behind their checks was reached."""
        self.kv = np.random.default_rng(0).standard_normal(
            (2, SPEC.layers, SPEC.kv_heads, len(TOKENS), SPEC.head_dim), np.float32
        )
        self.names = ["doc", "other", THEIRS, f"globex/{THEIRS}", "dropped"]
        self.session_ids: list[str] = []
        self._address = server.target.removeprefix("kvdb://")
        self._globex = kvdb.connect(server.target, token=tokens["globex"])
        secret = np.full_like(self.kv[0], SECRET_VALUE)
        pairs = list(zip(secret, secret, strict=True))
        for name in (THEIRS, MARK):
            self._globex.import_context(SPEC, SECRET_TOKENS, pairs, name=name, metadata={"note": MARK})
        self._session = self._globex.create_session(SPEC, SECRET_TOKENS, label=MARK)
        self._query = np.ones((SPEC.q_heads, 1, SPEC.head_dim), np.float32)
        self._answer = self._ask()

    def run(self, calls_max: int, seconds: float) -> None:
        """Make that many calls at most, for that time. Raises Finding."""
        ends = time.monotonic() + seconds
        metadata = (("authorization", f"Bearer {self.tokens['acme']}"),)
        with grpc.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            while self.calls < calls_max and time.monotonic() < ends:
                if self.calls % CHECK_EVERY == 0:
                    self._renew()
                case = random.Random(f"{self.seed}:{self.calls}")
                method = self.methods[self.calls % len(self.methods)]
                self._one(channel, metadata, method, case)
                self.calls += 1
                if self.calls % CHECK_EVERY == 0:
                    self.check()
        self.check()

    def check(self) -> None:
        """A right call is answered, the other tenant has what it had, and all has its owner. Raises Finding, IntegrityError."""
        if not np.array_equal(self._ask(), self._answer):
            raise Finding(f"seed {self.seed}: the other tenant's session answers otherwise after {self.calls} calls")
        if not self.admin and {context.name for context in self._globex.contexts()} != {THEIRS, MARK}:
            raise Finding(f"seed {self.seed}: the other tenant's contexts changed before call {self.calls}")
        with kvdb.connect(self.server.target, token=self.tokens["acme"]) as acme, acme.create_session(SPEC, [1]) as session:
            session.attend(0, self._query, *(self._query[:2],) * 2)
        deadline = time.monotonic() + CALL_SECONDS_MAX
        while self.engine.handles._calls and time.monotonic() < deadline:
            time.sleep(0.001)  # a call that was broken off ends between two of its steps
        self.engine.check_integrity()

    def end(self) -> None:
        """Close and drop everything; nothing may be left. Raises Finding."""
        self._session.close()
        self._globex.close()
        self.server.stop(grace=0)
        for context in self.engine.contexts():
            self.engine.drop(context.name)
        self.engine.check_integrity()
        left = sum(tier.blocks_used for tier in self.engine.tiers())
        if left:
            raise Finding(f"seed {self.seed}: {left} blocks are used after all was closed and dropped")

    def _ask(self) -> np.ndarray:
        if not self._session.stats().tail_tokens:
            for layer in range(SPEC.layers):
                self._session.update(layer, self._query[:2], self._query[:2])
        return self._session.attention(0, self._query, retrieval=kvdb.Exact())

    def _renew(self) -> None:
        """Give the fuzzed tenant contexts and sessions that it can name, beside those that are gone and another's."""
        with kvdb.connect(self.server.target, token=self.tokens["acme"]) as acme:
            for name in ("doc", "dropped"):
                with suppress(kvdb.errors.AlreadyExists, kvdb.errors.CapacityError):
                    acme.import_context(SPEC, TOKENS, list(zip(*self.kv, strict=True)), name=name)
            with suppress(kvdb.errors.NotFound):
                acme.drop("dropped")
        metadata = (("authorization", f"Bearer {self.tokens['acme']}"),)
        with grpc.insecure_channel(self._address) as channel:
            stub = channel.unary_unary(
                "/kvdb.v1.Kvdb/CreateSession", pb.CreateSessionRequest.SerializeToString, pb.SessionReply.FromString
            )
            close = channel.unary_unary("/kvdb.v1.Kvdb/CloseSession", pb.CloseSessionRequest.SerializeToString)
            for old in self.session_ids[SESSIONS_MAX:]:
                with suppress(grpc.RpcError):
                    close(pb.CloseSessionRequest(session_id=old), metadata=metadata)
            request = pb.CreateSessionRequest(spec=codec.to_spec(SPEC), tokens=TOKENS.tobytes())
            made = [stub(request, metadata=metadata).session_id for _ in range(3)]
        self.session_ids[:] = [*made, self._session._transport.id, *self.session_ids][:SESSIONS_MAX]

    def _one(self, channel: grpc.Channel, metadata: tuple, method: MethodDescriptor, case: random.Random) -> None:
        source = Messages(case, SPEC, TOKENS.tobytes(), self.names, self.session_ids)
        path = f"/kvdb.v1.Kvdb/{method.name}"
        options = {"timeout": CALL_SECONDS_MAX, "metadata": metadata}
        if method.client_streaming:
            sent = self._messages(source, method, case)
            call = channel.stream_stream(path)(iter(sent), **options)
        else:
            sent = [source.raw(method.input_type)]
            call = (
                channel.unary_stream(path)(sent[0], **options)
                if method.server_streaming
                else iter([channel.unary_unary(path).future(sent[0], **options)])
            )
        cut = case.choice([0, 1, 2, None, None, None]) if method.client_streaming or method.server_streaming else None
        replies, status = self._listen(call, cut)
        where = f"seed {self.seed}, call {self.calls}, {method.name} of {[data.hex() for data in sent]}"[:4000]
        self.codes[status.name] = self.codes.get(status.name, 0) + 1
        self.answered.update({method.name} if status is grpc.StatusCode.OK and replies else ())
        said = b"".join(replies)
        if status in BUGS:
            raise Finding(f"{where}: {status.name}: {said.decode(errors='replace')}")
        for secret in () if self.admin else SECRETS:
            if secret in said:
                raise Finding(f"{where}: what it answers holds the other tenant's {secret!r}")
        if method.name in {"CreateSession", "Fork"} and replies and status is grpc.StatusCode.OK:
            self.session_ids.append(pb.SessionReply.FromString(replies[0]).session_id)

    def _listen(self, call, cut: int | None) -> tuple[list[bytes], grpc.StatusCode]:
        """What a call answers, and how it ends; cut: after how many replies it is broken off, None for never."""
        replies: list[bytes] = []
        try:
            for reply in call:
                replies.append(reply.result() if isinstance(reply, grpc.Future) else reply)
                if cut is not None and len(replies) > cut:
                    call.cancel()
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.CANCELLED and cut is not None:
                return replies, failure.code()
            values = [value for _, value in failure.trailing_metadata() or ()]
            trailing = b"".join(value.encode(errors="replace") if isinstance(value, str) else value for value in values)
            return [*replies, (failure.details() or "").encode(errors="replace"), trailing], failure.code()
        return replies, grpc.StatusCode.OK

    def _messages(self, source: Messages, method: MethodDescriptor, case: random.Random) -> list[bytes]:
        """What is sent over a stream: nonsense, or what is right with pieces lost, repeated and out of order."""
        if case.random() < 0.5:
            return [source.raw(method.input_type) for _ in range(case.randint(0, STREAM_MESSAGES_MAX))]
        right = self._import(case) if method.name == "ImportContext" else self._decode(source, case)
        messages = [message.SerializeToString() for message in right]
        match case.choice(["right", "lost", "repeated", "shuffled", "nonsense"]):
            case "lost":
                del messages[case.randrange(len(messages))]
            case "repeated":
                messages.insert(case.randrange(len(messages)), case.choice(messages))
            case "shuffled":
                case.shuffle(messages)
            case "nonsense":
                messages.insert(case.randrange(len(messages)), source.raw(method.input_type))
        return messages

    def _import(self, case: random.Random) -> list[pb.ImportRequest]:
        tokens = np.array([case.randrange(1 << 20) for _ in range(20)], np.int32)
        begin = pb.ImportBegin(spec=codec.to_spec(SPEC), tokens=tokens.tobytes(), name=case.choice([*self.names, ""]))
        shape = [SPEC.kv_heads, len(tokens), SPEC.head_dim]
        data = np.ones((2, *shape), np.float32).tobytes()
        heads = [pb.KvChunk(layer=layer, dtype="float32", shape=shape) for layer in range(SPEC.layers)]
        chunks = [pb.ImportRequest(chunk=head, data=data) for head in heads]
        return [pb.ImportRequest(begin=begin), *chunks, pb.ImportRequest(commit=pb.ImportCommit())]

    def _decode(self, source: Messages, case: random.Random) -> list[pb.DecodeRequest]:
        session = case.choice([*self.session_ids, "absent"])
        requests = []
        for at in range(3):
            arrays = {name: source.array(name) for name in "qkv"} if case.random() < 0.8 else {}
            attend = pb.AttendRequest(session_id="" if at else session, layer=at % SPEC.layers, **arrays)
            requests.append(pb.DecodeRequest(attend=attend))
        return requests


@contextmanager
def fuzzed(folder: Path, seed: int, *, admin: bool = False, store: bool = False) -> Iterator[Fuzzed]:
    """A server of two tenants to be fuzzed; without a finding it is closed, and must be empty then. admin: whether who fuzzes is
    one. store: whether the server keeps one, which is opened once more in the end."""
    path = folder / "tokens.json"
    tokens = {tenant: new_token(path, tenant, admin=admin and tenant == "acme") for tenant in ("acme", "globex")}
    config = Config(storage=StorageConfig(arena_bytes=1 << 20, path=str(folder / "store") if store else ""))
    with database(config=config) as engine:
        server = Server(engine, ServerConfig(port=0, tokens_file=str(path), local_socket=""))
        server.start()
        try:
            run = Fuzzed(server, engine, tokens, seed, admin=admin)
            yield run
            run.end()
        finally:
            server.stop(grace=0)
    if store:
        with database(config=config) as engine:
            if engine.contexts() or engine.verify_store():
                raise Finding(f"seed {seed}: the store holds {engine.contexts()} after all was dropped")


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run, to make its calls again")
    parser.add_argument("--admin", action="store_true")
    parser.add_argument("--store", action="store_true")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)  # noqa: T201
    how = {"admin": arguments.admin, "store": arguments.store}
    with TemporaryDirectory() as folder, fuzzed(Path(folder), seed, **how) as run:
        try:
            run.run(sys.maxsize, arguments.seconds)
        finally:
            unanswered = sorted({method.name for method in run.methods} - run.answered)
            print(f"{run.calls} calls: {run.codes}; never answered: {unanswered}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
