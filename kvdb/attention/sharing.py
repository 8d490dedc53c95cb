"""What several sessions read of the same, so that it need be read once (prefix-shared decoding)."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Group(NamedTuple):
    """Views that the same sessions read. views: their numbers among the first member's. members: two or more, ascending."""

    views: tuple[int, ...]
    members: tuple[int, ...]


class Sharing(NamedTuple):
    """What is read once for each group, and the numbers of the views that each session reads alone."""

    groups: list[Group]
    alone: list[list[int]]


def sharing_of(sessions: Sequence[Sequence[Hashable]]) -> Sharing:
    """Who shares what. sessions: the views of each, of which equal ones hold the same keys and values for the same query; a view
    stands once in a session."""
    readers: dict[Hashable, list[int]] = {}
    for session, views in enumerate(sessions):
        for view in views:
            readers.setdefault(view, []).append(session)
    shared: dict[tuple[int, ...], list[Hashable]] = {}
    for view, members in readers.items():
        if len(members) > 1:
            shared.setdefault(tuple(members), []).append(view)
    groups = [Group(tuple(map(sessions[members[0]].index, views)), members) for members, views in shared.items()]
    alone = [[number for number, view in enumerate(views) if len(readers[view]) == 1] for views in sessions]
    return Sharing(groups, alone)
