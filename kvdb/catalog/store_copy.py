"""Copies the files of contexts to a backup."""

from collections.abc import Sequence

import kvdb.catalog.check as context_check
from kvdb.catalog.context import Context, files_of
from kvdb.errors import IntegrityError
from kvdb.storage.backup_folder import BackupFolder
from kvdb.storage.disk import SegmentFolder


def copy_files(contexts: Sequence[Context], disk: SegmentFolder, target: BackupFolder) -> None:
    """Copy the files of contexts, which the caller holds, and read the copies. Raises IntegrityError, also where what was stored
    is damaged, CapacityError or Unavailable."""
    copies = []
    for file in files_of(contexts):
        suffixes = disk.kept_beside(file)
        copies.append((file, target.add(file, suffixes), suffixes))
    target.sync()
    for file, copy, suffixes in copies:
        try:
            context_check.check_copy(copy, suffixes)
        except IntegrityError as error:
            raise IntegrityError(f"the copy of {file.path} is not what was stored ({error}); kvdb verify") from None
