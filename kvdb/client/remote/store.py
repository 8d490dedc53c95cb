"""What can be asked of a whole store on a server, and of the plans of its queries."""

from abc import ABC, abstractmethod

from kvdb.client.remote.connection import Connection
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.rpc.plans import from_plan
from kvdb.rpc.query_options import put_query_options
from kvdb.types import BackedUp, Checked, DatabaseStatus, SessionInfo, Space, UnknownFile
from query_optimizer.plan import Plan
from query_optimizer.query_options import QueryOptions


class RemoteStore(ABC):
    """The calls that `kvdb.operations` answers on the server. Thread-safe."""

    def check(self, name: str) -> Checked:
        """Check a context on the server; see `kvdb.database.Database.check`, whose errors it raises."""
        connection = self._connected()
        reply: pb.CheckContextReply = connection.call(connection.stub.CheckContext, pb.CheckContextRequest(name=name))
        return Checked(reply.blocks, reply.nbytes, reply.indexes)

    def check_store(self) -> list[str]:
        """Check the server's store; see `kvdb.database.Database.check_store`, whose errors it raises."""
        connection = self._connected()
        reply: pb.CheckStoreReply = connection.call(connection.stub.CheckStore, pb.CheckStoreRequest())
        return list(reply.damaged)

    def unknown_files(self, remove: bool) -> list[UnknownFile]:
        """Files of the server's store; see `kvdb.database.Database.unknown_files`, whose errors it raises."""
        connection = self._connected()
        reply: pb.UnknownFilesReply = connection.call(connection.stub.UnknownFiles, pb.UnknownFilesRequest(remove=remove))
        return [UnknownFile(file.name, file.nbytes) for file in reply.files]

    def compact(self) -> int:
        """Give space back on the server; see `kvdb.database.Database.compact`, whose errors it raises."""
        connection = self._connected()
        reply: pb.CompactReply = connection.call(connection.stub.Compact, pb.CompactRequest())
        return int(reply.nbytes)

    def status(self) -> DatabaseStatus:
        """How the server is used at the moment; see `kvdb.database.Database.status`."""
        connection = self._connected()
        reply: pb.StatusReply = connection.call(connection.stub.Status, pb.StatusRequest())
        counts = reply.contexts, reply.sessions, dict(reply.indexes), reply.building
        return DatabaseStatus(reply.version, reply.uptime_seconds, *counts, reply.calls, reply.calls_max, reply.calls_waiting)

    def space(self) -> Space:
        """How much space the contexts of the server take; see `kvdb.database.Database.space`."""
        connection = self._connected()
        reply: pb.SpaceReply = connection.call(connection.stub.Space, pb.SpaceRequest())
        return Space(reply.held, reply.reachable)

    def backup(self, folder: str, link: bool) -> BackedUp:
        """Copy the server's store on its machine; see `kvdb.database.Database.backup`, whose errors it raises."""
        connection = self._connected()
        reply: pb.BackupReply = connection.call(connection.stub.Backup, pb.BackupRequest(folder=folder, link=link))
        counts = reply.contexts, reply.copied, reply.reflinked, reply.linked
        return BackedUp(*counts, reply.nbytes, reply.same_file_system)

    def explain(self, name: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]:
        """The plans of a query behind a context; see `kvdb.database.Database.explain`, whose errors it raises."""
        connection = self._connected()
        request = pb.ExplainContextRequest(name=name, layer=layer, analyze=analyze)
        put_query_options(request, options)
        reply: pb.ExplainContextReply = connection.call(connection.stub.ExplainContext, request)
        return [from_plan(text) for text in reply.plans]

    def sessions(self) -> list[SessionInfo]:
        """The open sessions on the server that have a label."""
        connection = self._connected()
        reply: pb.ListSessionsReply = connection.call(connection.stub.ListSessions, pb.ListSessionsRequest())
        return [SessionInfo(told.label, told.tokens, told.reused, told.queries) for told in reply.sessions]

    def explain_session(self, label: str, layer: int | None, options: QueryOptions, analyze: bool) -> list[Plan]:
        """The plans of a session's next query; see `kvdb.database.Database.explain_session`, whose errors it raises."""
        connection = self._connected()
        request = pb.ExplainSessionRequest(label=label, layer=layer, analyze=analyze)
        put_query_options(request, options)
        reply: pb.ExplainContextReply = connection.call(connection.stub.ExplainSession, request)
        return [from_plan(text) for text in reply.plans]

    @abstractmethod
    def _connected(self) -> Connection:
        """Raises Unavailable for a closed database."""
