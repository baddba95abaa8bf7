"""One participant by hand: what it does with each event, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.comm.membership.actions import Action, Applied, Copy, Dropped, Send, Stopped
from dsx.comm.membership.bounds import LANES
from dsx.comm.membership.codec import MessageRefused
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
from dsx.comm.membership.messages import Append, Install, Outside, Prepare, Promise, Refusal
from dsx.comm.membership.participant import Participant
from dsx.comm.membership.quorum import is_quorum
from dsx.comm.membership.state import LogContradicted, State
from dsx.core.membership import Member, Membership
from tests.comm.membership.forms import messages

BOTH = (Contributor(0, 5), Contributor(1, 7, 2.0))


def taken(participant: Participant) -> list[Action]:
    found = list(participant.actions)
    participant.actions.clear()
    return found


def founder() -> Participant:
    one = Participant(Contributor(0, 5), [0])
    one.tick()
    return one


def follower() -> Participant:
    """Cluster 1 of two, under a ballot of cluster 0, with its copy, in the view of epoch 2."""
    one = Participant(Contributor(1, 7, 2.0), [0, 1])
    one.up(0, 5)
    state = State().after(View(1, BOTH[:1])).after(Join(Joiner(1, 7, 1)))
    one.receive(0, 5, Install(Ballot(1, 0, 5), 1, state, ()))
    (copy,) = [action for action in taken(one) if isinstance(action, Copy)]
    one.ready(copy.request, copy.state.index)
    receive_entries(one, View(2, BOTH))
    assert one.is_contributor
    taken(one)
    return one


def receive_entries(one: Participant, *entries: Any) -> None:
    start = one.state.index
    append = Append(Ballot(1, 0, 5), start, entries, start + len(entries), 0)
    one.receive(0, 5, append)


def of_kind(participant: Participant, kind: type) -> list[Any]:
    return [action for action in taken(participant) if isinstance(action, kind)]


def test_one_cluster_alone_founds_a_run_and_commits() -> None:
    one = founder()
    assert one.is_coordinator and one.is_contributor and one.waits_for == ()
    (first,) = of_kind(one, Applied)
    assert first.entry == View(1, (Contributor(0, 5),)) and first.is_contributor
    assert one.state.membership == Membership(1, (Member(0),))
    assert one.done("stage 0/fragment 1", 0, 1, "d0")
    assert not one.done("stage 0/fragment 1", 0, 1, "d0"), "it is committed already"
    assert one.done("stage 0/fragment 1", 1, 1, "d1")
    commits = [applied.entry for applied in of_kind(one, Applied)]
    assert commits == [
        Commit("stage 0/fragment 1", 0, 1, "d0"), Commit("stage 0/fragment 1", 1, 1, "d1"),
    ]  # fmt: skip
    one.finish()
    (end,) = of_kind(one, Applied)
    assert end.entry == End(1) and one.is_over
    one.say("late", "")
    assert not of_kind(one, Applied), "nothing follows the end"


def test_transfers_in_flight_on_one_lane_commit_in_order() -> None:
    one = founder()
    taken(one)
    one.done("a", 1, 1, "d1")
    assert not of_kind(one, Applied)
    one.done("a", 0, 1, "d0")
    assert [applied.entry.number for applied in of_kind(one, Applied)] == [0, 1]


def test_an_attempt_that_a_view_has_ended_is_void() -> None:
    one = follower()
    assert not one.done("a", 0, 1, "d")
    assert one.done("a", 0, 2, "d")
    with pytest.raises(ValueError, match="a/0 was reported as d and now as e: an attempt has one"):
        one.done("a", 0, 2, "e")
    with pytest.raises(MessageRefused, match="not a text of at most 64 characters"):
        one.done("a", 1, 2, "d" * 65)


def test_the_commit_of_what_was_reported_is_its_own() -> None:
    one = follower()
    one.done("a", 0, 2, "d")
    receive_entries(one, Commit("a", 0, 2, "d"))
    (applied,) = of_kind(one, Applied)
    assert applied.is_contributor and applied.state.next_number("a") == 1 and not one.stopped


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (Commit("a", 0, 2, "e"), "a/0 of view 2 was committed as e; held here: d"),
        (Commit("b", 0, 2, "e"), "b/0 of view 2 was committed as e; held here: nothing"),
        (Commit("a", 1, 2, "d"), "has number 1; 0 is due"),
        (Commit("a", 0, 1, "d"), "has epoch 1; 2 is due"),
        (View(4, BOTH), "has epoch 4; 3 is due"),
        (End(1), "has epoch 1; 2 is due"),
    ],
)
def test_one_that_is_told_what_cannot_be_stops_and_says_so(entry: Any, why: str) -> None:
    one = follower()
    one.done("a", 0, 2, "d")
    taken(one)
    receive_entries(one, entry)
    stopped = taken(one)[-1]
    assert isinstance(stopped, Stopped) and stopped.reason == one.stopped
    assert one.stopped.startswith("cluster 1 stops: ") and why in one.stopped
    index = one.state.index
    one.tick()
    one.up(0, 6)
    one.down(0)
    one.say("k", "v")
    receive_entries(one, View(3, BOTH))
    assert not one.done("a", 0, 2, "d")
    assert one.state.index == index and not taken(one), "no event has any effect any more"


def test_after_the_end_nothing_is_followed() -> None:
    with pytest.raises(LogContradicted, match="follows the end of the run"):
        State().after(View(1, BOTH)).after(End(1)).after(Said("k", "v", 0))


@pytest.mark.parametrize(
    "message",
    [
        Append(Ballot(9, 2, 3), 0, (), 0, 0),
        Prepare(Ballot(9, 2, 3), 0),
        Outside(Ballot(9, 2, 3), 9),
        Install(Ballot(9, 2, 3), 0, State(9, 9, BOTH), ()),
        Append(Ballot(9, 0, 4), 0, (), 0, 0),  # of an earlier process of the sender
    ],
    ids=lambda message: type(message).__name__,
)
def test_nobody_uses_the_ballot_of_another(message: Any) -> None:
    one = follower()
    one.receive(0, 5, message)
    assert not taken(one) and one.state.index == 3
    receive_entries(one, View(3, BOTH))
    assert one.state.epoch == 3, "it has promised nothing to the other"


def test_a_message_of_a_process_that_is_not_linked_is_dropped() -> None:
    one = follower()
    one.receive(0, 4, Append(Ballot(1, 0, 5), 3, (View(3, BOTH),), 4, 0))
    one.down(0)
    one.receive(0, 5, Append(Ballot(1, 0, 5), 3, (View(3, BOTH),), 4, 0))
    assert one.state.epoch == 2
    one.up(0, 4)
    assert one.links == {}, "an older process of cluster 0 cannot come back"


def test_a_deposed_coordinator_is_told_so() -> None:
    one = follower()
    one.down(0)
    one.up(0, 6)
    one.receive(0, 6, Prepare(Ballot(2, 0, 6), 0))
    (sent,) = [a.message for a in of_kind(one, Send) if isinstance(a.message, Promise)]
    assert sent.accepted == Ballot(1, 0, 5) and sent.index == 3
    one.receive(0, 6, Append(Ballot(1, 0, 6), 3, (View(3, BOTH),), 4, 0))
    assert [a.message for a in of_kind(one, Send)] == [Refusal(Ballot(2, 0, 6))]
    assert one.state.epoch == 2


def test_one_outside_of_the_view_joins_again_with_another_request() -> None:
    one = follower()
    one.receive(0, 5, Outside(Ballot(1, 0, 5), 1))
    assert one.is_contributor, "that was before the view that took it in"
    receive_entries(one, View(3, BOTH[:1]))
    one.receive(0, 5, Outside(Ballot(1, 0, 5), 3))
    assert of_kind(one, Dropped) and one.request == 2


def test_a_joiner_whose_place_the_next_coordinator_has_cut_off_asks_again() -> None:
    """It holds entries of the last one as far as there, and has not applied them."""
    one = Participant(Contributor(2, 9), [0, 1, 2])
    one.up(0, 5)
    one.up(1, 7)
    state = State().after(View(1, BOTH)).after(Join(Joiner(2, 9, 1)))
    one.receive(0, 5, Install(Ballot(1, 0, 5), 1, state, tuple(Said(k, "v", 0) for k in "abc")))
    (copy,) = [action for action in taken(one) if isinstance(action, Copy)]
    one.ready(copy.request, copy.state.index)
    one.down(0)
    far = Append(Ballot(2, 1, 7), state.index + 2, (Said("b", "w", 1),), state.index + 3, 0)
    for _ in range(60):
        one.receive(1, 7, far)
        one.tick()
    assert one.request > 1


def test_what_was_taken_over_from_another_is_never_left_out() -> None:
    """Its leader may have decided it before it ended; only what is one's own may be dropped."""
    everyone = (Contributor(0, 5), Contributor(1, 7), Contributor(2, 9))
    one = Participant(everyone[2], [0, 1, 2])
    one.begin(everyone)
    one.up(0, 5)
    one.up(1, 7)
    one.receive(0, 5, Append(Ballot(1, 0, 5), 1, (Said("k", "decided", 0),), 1, 0))
    one.down(0)
    taken(one)
    for number in (2, 3):  # it leads, loses the other one before that has taken it, and leads again
        for _ in range(60):
            one.tick()
            sent = [a.message for a in of_kind(one, Send)]
            if Prepare(Ballot(number, 2, 9), 1) in sent:
                break
        one.receive(1, 7, Promise(Ballot(number, 2, 9), Ballot(0, 0, 0), 1, 1, ()))
        assert one.is_coordinator
        appended = [a.message for a in of_kind(one, Send) if isinstance(a.message, Append)]
        assert appended and appended[-1].entries[0] == Said("k", "decided", 0)
        one.down(1)
        for _ in range(60):
            one.tick()
        assert not one.is_coordinator
        one.up(1, 7)
        taken(one)


def test_a_voter_that_fell_behind_votes_on_but_neither_contributes_nor_stands() -> None:
    one = follower()
    state = one.state.after(Commit("a", 0, 2, "d")).after(Commit("a", 1, 2, "e"))
    one.receive(0, 5, Install(Ballot(1, 0, 5), 0, state, ()))
    assert of_kind(one, Dropped) and one.state == state
    assert (one.request, one.is_contributor) == (2, False)
    receive_entries(one, View(3, BOTH))  # as after digests that differ; it is not whole by that
    assert (one.request, one.is_contributor) == (2, False)
    one.down(0)
    taken(one)
    one.up(0, 6)  # the coordinator's process has ended, and its next one is there
    for _ in range(60):
        one.tick()
    assert not [a for a in of_kind(one, Send) if isinstance(a.message, Prepare)]


def test_a_contributor_stands_when_the_coordinator_has_ended() -> None:
    one = follower()
    one.down(0)
    one.up(0, 6)
    for _ in range(60):
        one.tick()
    sent = [a.message for a in of_kind(one, Send)]
    assert Prepare(Ballot(2, 1, 7), 3) in sent and one.is_coordinator, "alone: the other restarted"
    assert [c.id for c in one.state.contributors] == [1]


def test_the_log_remembers_the_first_saying_for_as_long_as_asked() -> None:
    state = State().after(View(1, BOTH)).after(Said("k", "first", 0, lasts=2))
    assert state.after(Said("k", "second", 1)).said["k"].value == "first"
    later = state.after(Commit("a", 0, 1, "d")).after(Commit("a", 1, 1, "d"))
    assert state.recalls("k") and not later.recalls("k")
    assert later.after(Said("k", "second", 1)).said["k"].value == "second"


def test_too_much_is_refused_by_name() -> None:
    one = founder()
    with pytest.raises(MessageRefused, match=r"not a text of at most 200 characters"):
        one.say("k" * 201, "")
    with pytest.raises(MessageRefused, match=r"not a text of at most 2000 characters"):
        one.say("k", "v" * 2001)
    with pytest.raises(ValueError, match="lasts=-1 must be from 1 to"):
        one.say("k", "v", lasts=-1)
    for number in range(LANES):
        one.done(f"{number}", 0, 1, "d")
    with pytest.raises(ValueError, match=f"lane 'more' is one more than the {LANES}"):
        one.done("more", 0, 1, "d")
    with pytest.raises(ValueError, match="300 clusters have a key, of 256 at most"):
        Participant(Contributor(0, 5), range(300))
    with pytest.raises(ValueError, match="arbiter 4 must be among the clusters that have a key"):
        Participant(Contributor(0, 5), [0, 1], arbiter=4)
    with pytest.raises(ValueError, match="cluster 3 and arbiter None must be among"):
        Participant(Contributor(3, 5), [0, 1])
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="must be finite and > 0"):
            Contributor(0, 5, weight)


def processes(text: str) -> dict[int, int]:
    return {int(pair[0]): int(pair[1]) for pair in text.split()}


def quorums() -> Iterator[Any]:
    # contributors 0, 1, ... of incarnation 1; who is there; newest met; arbiter; may they decide?
    yield 1, "01", "", None, True
    yield 1, "02", "", None, False  # a restarted process
    yield 2, "01", "", None, False
    yield 2, "01", "11", None, False
    yield 2, "01", "12", None, True  # the other's process has ended
    yield 2, "01", "12", 1, False  # ... but the arbiter's word counts, and it has not come back
    yield 2, "01", "12", 0, True
    yield 2, "01", "", 0, True
    yield 2, "11", "", 0, False
    yield 3, "01 11", "", None, True
    yield 3, "01", "12 22", None, False  # of three, no proof counts
    yield 3, "01", "", 0, False  # the arbiter decides even splits and nothing else
    yield 3, "11 21", "", 0, True
    yield 4, "01 11", "", None, False
    yield 4, "01 11", "", 0, True
    yield 4, "01 11", "", 2, False
    yield 5, "01 11", "", 0, False
    yield 5, "01 11 21", "", 4, True


@pytest.mark.parametrize(("size", "here", "newest", "arbiter", "may_decide"), list(quorums()))
def test_who_is_a_quorum(
    size: int, here: str, newest: str, arbiter: int | None, may_decide: bool
) -> None:
    contributors = tuple(Contributor(id, 1) for id in range(size))
    found = is_quorum(contributors, processes(here), processes(newest), arbiter)
    assert found is may_decide


@settings(max_examples=150)
@given(st.lists(messages | st.just("tick"), max_size=8), st.booleans())
def test_whatever_a_peer_sends_it_goes_on_or_stops_by_name(events: list[Any], leads: bool) -> None:
    """A member's process may be broken: that ends in a named stop at the worst."""
    if leads:
        one, peer, incarnation = Participant(Contributor(0, 1), [0]), 1, 2
        one.tick()
        assert one.is_coordinator
    else:
        one, peer, incarnation = follower(), 0, 5
    one.up(peer, incarnation)
    for event in events:
        if event == "tick":
            one.tick()
        else:
            one.receive(peer, incarnation, claimed_by(event, peer, incarnation))
    from dsx.comm.membership.messages import encode

    for sent in of_kind(one, Send):
        encode(sent.message)  # and what it sends can be sent


def claimed_by(message: Any, peer: int, incarnation: int) -> Any:
    """The same under a ballot of the sender's own, where it has one: others are not looked at."""
    if not isinstance(message, Append | Install | Prepare | Outside):
        return message
    ballot = Ballot(message.ballot.number, peer, incarnation)
    return type(message)(ballot, *(vars(message)[name] for name in list(vars(message))[1:]))
