"""The calls about all that the server stores. Each counts among the streams, because it holds its thread for long."""

from dataclasses import asdict
from pathlib import PurePath

import grpc

from kvdb.errors import InvalidArgument
from kvdb.rpc import kvdb_pb2 as pb
from kvdb.server.streams import Streams
from kvdb.server.tenancy.tenants import AnyDatabase


class StoreCalls:
    """Calls of the service that check, copy or compact the store; the service sets what they work on."""

    _database: AnyDatabase
    _streams: Streams

    def check_context(self, request: pb.CheckContextRequest, context: grpc.ServicerContext) -> pb.CheckContextReply:
        with self._streams.opened(context) as stream:
            self._streams.begin(stream)
            checked = self._database.check(request.name)
            return pb.CheckContextReply(blocks=checked.blocks, nbytes=checked.nbytes, indexes=checked.indexes)

    def check_store(self, _request: pb.CheckStoreRequest, context: grpc.ServicerContext) -> pb.CheckStoreReply:
        with self._streams.opened(context) as stream:
            self._streams.begin(stream)
            return pb.CheckStoreReply(damaged=self._database.check_store())

    def unknown_files(self, request: pb.UnknownFilesRequest, context: grpc.ServicerContext) -> pb.UnknownFilesReply:
        with self._streams.opened(context) as stream:
            self._streams.begin(stream)
            files = self._database.unknown_files(request.remove)
            return pb.UnknownFilesReply(files=[pb.UnknownFile(**asdict(file)) for file in files])

    def backup(self, request: pb.BackupRequest, context: grpc.ServicerContext) -> pb.BackupReply:
        if not PurePath(request.folder).is_absolute():
            raise InvalidArgument(f"a backup to {request.folder!r}; expected an absolute path on the server's machine")
        with self._streams.opened(context) as stream:
            self._streams.begin(stream)
            return pb.BackupReply(**asdict(self._database.backup(request.folder, request.link)))

    def space(self, _request: pb.SpaceRequest, context: grpc.ServicerContext) -> pb.SpaceReply:
        with self._streams.opened(context) as stream:
            self._streams.begin(stream)
            space = self._database.space()
            return pb.SpaceReply(held=space.held, reachable=space.reachable)

    def compact(self, _request: pb.CompactRequest, context: grpc.ServicerContext) -> pb.CompactReply:
        with self._streams.opened(context) as stream:
            self._streams.begin(stream)
            return pb.CompactReply(nbytes=self._database.compact())
