"""What several sessions read of the same, so that it need be read once (prefix-shared decoding)."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

View = TypeVar("View", bound=Hashable)


class Group(NamedTuple):
    """Views that the same sessions read. views: their numbers among the first member's. members: two or more, ascending."""

    views: tuple[int, ...]
    members: tuple[int, ...]


class Sharing(NamedTuple):
    """What is read once for each group, and the numbers of the views that each session reads alone."""

    groups: list[Group]
    alone: list[list[int]]


def sharing_of(sessions: Sequence[Sequence[View]], worth: Callable[[View], bool]) -> Sharing:
    """Who shares what. sessions: the views of each, of which equal ones hold the same keys and values for the same query; a view
    stands once in a session. worth: whether a view that several have is to be read once."""
    readers: dict[View, list[int]] = {}
    for session, views in enumerate(sessions):
        for view in views:
            readers.setdefault(view, []).append(session)
    once = {view: tuple(members) for view, members in readers.items() if len(members) > 1 and worth(view)}
    shared: dict[tuple[int, ...], list[View]] = {}
    for view, members in once.items():
        shared.setdefault(members, []).append(view)
    groups = [Group(tuple(map(sessions[members[0]].index, views)), members) for members, views in shared.items()]
    alone = [[number for number, view in enumerate(views) if view not in once] for views in sessions]
    return Sharing(groups, alone)
