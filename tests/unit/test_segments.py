"""Where epochs ended: the compressed table against a plain one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import DataLossError
from headgate.manifest import ChainPoint
from headgate.manifest.model import FIRST_POINT, Segment, Segments
from headgate.wal.fence import over_seals

chains = st.lists(st.one_of(st.just(0), st.just(0), st.integers(0, 5)), max_size=25)
"""How many data entries each finished epoch holds; many are idle reopens with none."""


class Naive:
    """Every position of a chain, written out."""

    def __init__(self, entries: list[int]) -> None:
        self.ends: dict[int, int] = {}
        self.points: list[ChainPoint] = []
        for epoch, count in enumerate(entries, 1):
            self.points += [ChainPoint(epoch, len(self.points) + i) for i in range(count + 1)]
            self.ends[epoch] = len(self.points) - 1
        self.next = ChainPoint(len(entries) + 1, len(self.points))


@given(chains)
def test_ends_are_those_that_were_added(entries: list[int]) -> None:
    naive = Naive(entries)
    segments = Segments().adding(naive.ends)
    for epoch in range(len(entries) + 3):
        assert segments.end_of(epoch) == naive.ends.get(epoch)
    assert list(segments.ends()) == [ChainPoint(epoch, end) for epoch, end in naive.ends.items()]


@given(chains)
def test_adding_one_by_one_again_or_all_at_once_is_the_same(entries: list[int]) -> None:
    naive = Naive(entries)
    at_once = Segments().adding(naive.ends)
    one_by_one = Segments()
    for epoch, end in naive.ends.items():
        one_by_one = one_by_one.adding({epoch: end})
    assert one_by_one.rows == at_once.rows
    assert at_once.adding(naive.ends).rows == at_once.rows
    assert Segments(at_once.rows).rows == at_once.rows


@given(chains, st.integers(0, 200))
def test_a_position_is_located_where_the_chain_has_it(entries: list[int], position: int) -> None:
    naive = Naive(entries)
    expected = naive.points[position] if position < len(naive.points) else naive.next
    assert Segments().adding(naive.ends).locate(position) == expected


@given(chains, st.data())
def test_a_position_is_located_from_a_later_point_too(entries: list[int], data: st.DataObject) -> None:
    naive = Naive(entries)
    everything = [*naive.points, naive.next]
    first = everything[data.draw(st.integers(0, len(everything) - 1))]
    position = data.draw(st.integers(first.position, len(everything) - 1))
    known = {epoch: end for epoch, end in naive.ends.items() if epoch >= data.draw(st.sampled_from([1, first.epoch]))}
    assert Segments().adding(known).locate(position, first) == everything[position]


@given(chains)
def test_over_seals_stops_at_the_next_data_or_the_tip(entries: list[int]) -> None:
    naive = Naive(entries)
    segments = Segments().adding(naive.ends)
    everything = [*naive.points, naive.next]
    for point in everything:
        at = point.position
        while at < len(naive.points) and naive.ends[everything[at].epoch] == at:
            at += 1
        assert over_seals(point, segments) == everything[at]


def test_any_number_of_idle_reopens_is_one_row() -> None:
    segments = Segments().adding({1: 10})
    for epoch in range(2, 1002):
        segments = segments.adding({epoch: 9 + epoch})
    assert segments.rows == (Segment(1, 10, 1001),)


def test_a_known_end_that_differs_is_never_overwritten() -> None:
    with pytest.raises(DataLossError):
        Segments().adding({1: 3}).adding({1: 4})


def test_an_epoch_is_not_added_behind_those_that_are_known() -> None:
    with pytest.raises(DataLossError):
        Segments().adding({5: 9}).adding({3: 4})


def test_points_past_data_and_past_a_seal() -> None:
    assert FIRST_POINT.past_data() == ChainPoint(1, 1)
    assert FIRST_POINT.past_seal() == ChainPoint(2, 1)
