"""Hypothesis strategies for everything that is sent about the log."""

from __future__ import annotations

from hypothesis import strategies as st

from dsx.comm.membership import messages as m
from dsx.comm.membership.bounds import INTEGER
from dsx.comm.membership.entries import (
    Ballot,
    Commit,
    Contributor,
    End,
    Join,
    Joiner,
    Said,
    View,
)
from dsx.comm.membership.state import Remembered, State

small = st.integers(0, 5)
integers = small | st.integers(0, INTEGER)
positive = st.integers(1, 4) | st.integers(1, INTEGER)
texts = st.text(max_size=20)
ballots = st.builds(Ballot, integers, small, st.integers(1, 3) | integers)
weights = st.floats(min_value=1e-6, max_value=1e6)


def by_id(one: st.SearchStrategy, min_size: int = 0) -> st.SearchStrategy:
    lists = st.lists(one, min_size=min_size, max_size=4, unique_by=lambda c: c.id)
    return lists.map(lambda found: tuple(sorted(found, key=lambda c: c.id)))


contributors = by_id(st.builds(Contributor, small, positive, weights), min_size=1)
joiners = st.builds(Joiner, small, positive, positive)
entries = st.one_of(
    st.builds(View, integers, contributors, by_id(joiners)),
    st.builds(Join, joiners),
    st.builds(Commit, texts, integers, integers, texts),
    st.builds(Said, texts, texts, small, small),
    st.builds(End, integers),
)
tails = st.lists(entries, max_size=4).map(tuple)
states = st.builds(
    State, index=integers, epoch=integers, contributors=contributors, joiners=by_id(joiners),
    next_numbers=st.dictionaries(texts, integers, max_size=3),
    said=st.dictionaries(texts, st.builds(Remembered, texts, small, integers), max_size=3),
    committed=integers, is_ended=st.booleans(), digest=texts,
)  # fmt: skip
statuses = st.builds(
    m.Status, integers, ballots, integers, integers, integers,
    st.lists(small, max_size=4).map(tuple),
    st.lists(st.builds(m.Report, texts, integers, texts), max_size=3).map(tuple),
    st.lists(st.builds(m.Saying, texts, texts, small), max_size=3).map(tuple),
    integers, integers, integers, weights, st.booleans(), st.booleans(),
)  # fmt: skip
messages = st.one_of(
    statuses,
    st.builds(m.Append, ballots, integers, tails, integers, integers),
    st.builds(m.Install, ballots, integers, states, tails),
    st.builds(m.Prepare, ballots, integers),
    st.builds(m.Promise, ballots, ballots, integers, integers, tails),
    st.builds(m.Refusal, ballots),
    st.builds(m.Outside, ballots, integers),
    st.builds(m.AskForLogs, integers),
    st.builds(m.NoLog, integers),
)
