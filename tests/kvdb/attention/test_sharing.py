"""Every view of every session is read exactly once: alone, or by one group."""

from hypothesis import given
from hypothesis import strategies as st

from kvdb.attention.shared_prefix import sharing_of


def always(view):
    return True


SESSIONS = st.lists(st.lists(st.integers(0, 5), unique=True, max_size=5), max_size=6)


@given(SESSIONS)
def test_every_view_is_read_once(sessions):
    groups, alone = sharing_of(sessions, always)
    read = [[views[number] for number in numbers] for views, numbers in zip(sessions, alone, strict=True)]
    for group in groups:
        for member in group.members:
            read[member] += [sessions[group.members[0]][number] for number in group.views]
    assert [sorted(views) for views in read] == [sorted(views) for views in sessions]


@given(SESSIONS)
def test_what_several_have_is_shared_by_all_of_them_in_as_few_groups_as_can_be(sessions):
    groups, alone = sharing_of(sessions, always)
    assert all(len(group.members) > 1 and list(group.members) == sorted(set(group.members)) for group in groups)
    assert len({group.members for group in groups}) == len(groups)
    for views, numbers in zip(sessions, alone, strict=True):
        assert not any(other is not views and views[number] in other for other in sessions for number in numbers)


@given(SESSIONS)
def test_what_is_not_worth_it_is_read_alone(sessions):
    groups, alone = sharing_of(sessions, lambda view: view > 2)
    for views, numbers in zip(sessions, alone, strict=True):
        readers = {view: sum(view in other for other in sessions) for view in views}
        assert [views[i] for i in numbers] == [view for view in views if readers[view] == 1 or view <= 2]
    assert all(sessions[group.members[0]][i] > 2 for group in groups for i in group.views)
