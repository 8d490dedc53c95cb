"""The protocol of a folder that belongs to one database."""

from pathlib import Path
from typing import Protocol


class Home(Protocol):
    """A folder that belongs to one database as long as it is open. key: names the folder among all others. path: where it is.
    setting: the one that says so."""

    key: str
    path: Path
    setting: str

    def sync(self) -> None:
        """Wait until the names of files that came are on the disk, if they are to outlive the database. Raises Unavailable."""
        ...

    def close(self) -> None:
        """Give the folder up. Closing twice does nothing."""
        ...
