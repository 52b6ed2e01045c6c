"""The schedule of `--verify auto`, on made-up machines: it finds what pays and never loses much while it
looks."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from minidflash.schedule import CREDIT, EARNED, PROBE, Schedule, SharedWidth, widths
from tests.models import numbers

AUTO = SimpleNamespace(verify="auto")
CPU = {1: 6.0, 4: 12.0, 8: 15.0, 16: 19.0}  # ms of a round, about what two cores take on the embedded pair
GPU = {1: 0.9, 4: 1.2, 8: 1.3, 16: 1.4}


def play(schedule, tokens, rate, rng):
    """(time taken, plain time) of a text of so many tokens whose drafts are right with probability `rate`
    each."""
    schedule.begin()
    total, left = 0.0, tokens
    while left > 0:
        width = schedule.choose(AUTO)
        right = rng.random(16) < rate
        accepted = int(np.argmin(np.append(right[: width - 1], False)))
        emitted = min(accepted + 1, left)
        cost = COSTS[id(schedule)][width]
        schedule.learn(width, accepted, emitted, cost)
        total, left = total + cost, left - emitted
    return total, tokens * COSTS[id(schedule)][1]


COSTS = {}


def fresh(costs):
    schedule = Schedule(16)
    schedule.seconds = dict(costs)
    COSTS[id(schedule)] = costs
    return schedule


def decode(shared, schedules, cost, rate, rounds, seed=0):
    """Rounds of all lanes, whose drafts are right with probability `rate` each, as Batch runs them.

    cost: (number of the round, v) -> its time. Returns ([v], time taken, plain rounds for the same tokens).
    """
    lanes, rng, chosen, taken, gained = len(schedules), np.random.default_rng(seed), [], 0.0, 0
    for _ in schedules:
        shared.begin(lanes)
    for number in range(rounds):
        width, tokens = shared.choose(lanes, schedules), 0
        seconds = cost(number, width)
        for one in schedules:
            accepted = int(np.argmin(np.append(rng.random(width - 1) < rate, False)))
            one.learn(width, accepted, accepted + 1, seconds)
            tokens += accepted + 1
        shared.learn(lanes, width, seconds, tokens / lanes)
        chosen.append(width)
        taken += seconds
        gained += tokens
    return chosen, taken, gained / lanes


def fresh_lanes(count):
    return [Schedule(16) for _ in range(count)]


@pytest.mark.parametrize("rate, lanes, best", [(0.95, 1, 16), (0.6, 8, 4), (0.0, 8, 1)])
def test_a_shared_width_pays_for_all_lanes(rate, lanes, best):
    """A row costs nothing with one lane, and much with eight."""
    shared, schedules = SharedWidth(16), fresh_lanes(lanes)
    shared.seconds |= {(one, width): 1.0 for one in (1, 8) for width in (1, 4, 8, 16) if one != lanes}
    chosen, *_ = decode(shared, schedules, lambda _, v: 1.0 + 0.02 * v * lanes**1.5 / 4, rate, 400)
    assert Counter(chosen[200:]).most_common(1)[0][0] == best
    assert chosen[:3] == [1, 1, 1], "plain rounds are what others are judged by"


FULL = {1: 1.0, 4: 5.0, 8: 7.0, 16: 9.0}  # plain rounds that a round costs where arithmetic bounds both


@pytest.mark.parametrize("costs", [FULL, {v: cost / CPU[1] for v, cost in CPU.items()}, GPU])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_many_lanes_lose_little_where_drafts_do_not_pay(costs, rate):
    """However few of its rows are right: three per cent, and behind the first tries two."""
    schedules, shared = fresh_lanes(8), SharedWidth(16)
    plain = costs[1]
    for rounds, within in ((300, 1.03), (600, 1.02)):
        _, taken, gained = decode(shared, schedules, lambda _, v: costs[v], rate, rounds, rounds)
        assert taken <= within * plain * gained
        schedules = fresh_lanes(8)  # others come, of whom nothing is known


def test_more_lanes_do_not_try_again_what_lost_with_fewer():
    shared = SharedWidth(16)
    decode(shared, fresh_lanes(4), lambda _, v: FULL[v], 0.5, 300)
    assert (4, 4) in shared.seconds
    chosen, *_ = decode(shared, fresh_lanes(8), lambda _, v: FULL[v], 0.5, 60)
    assert set(chosen) == {1}


@pytest.mark.parametrize(("rate", "least"), [(0.9, 0.9), (0.7, 0.9)])
def test_many_lanes_draft_where_it_pays(rate, least):
    def speed(shared):
        _, taken, gained = decode(shared, fresh_lanes(4), lambda _, v: GPU[v], rate, 300)
        return gained / taken

    assert speed(SharedWidth(16)) >= least * max(speed(fixed(v)) for v in GPU)


def test_a_first_time_that_was_disturbed_is_forgotten():
    def cost(number, width):
        seen[width] += 1
        return GPU[width] * {1: 10.0, 2: 3.0}.get(seen[width], 1.0)  # the second is the first that counts

    seen = Counter()
    chosen, *_ = decode(SharedWidth(16), fresh_lanes(4), cost, 0.9, 100)
    assert Counter(chosen[50:]).most_common(1)[0][0] == 16


def test_plain_rounds_that_were_disturbed_are_timed_again():
    """Drafts that lose look well beside them, and would for ever."""

    def cost(number, width):
        return GPU[width] * (3.0 if number < 3 else 1.0)

    chosen, *_ = decode(SharedWidth(16), fresh_lanes(4), cost, 0.0, 300)
    assert chosen[3:60].count(1) < 10 and chosen[200:].count(1) > 90


@pytest.mark.parametrize("before, after, ends", [(1.0, 8.0, 1), (8.0, 1.0, 16)])
def test_many_lanes_follow_what_rounds_cost(before, after, ends):
    """Drafting becomes dear, or cheap, in the middle."""

    def cost(number, width):
        return GPU[width] * ((before if number < 300 else after) if width > 1 else 1.0)

    chosen, *_ = decode(SharedWidth(16), fresh_lanes(4), cost, 0.9, 1600)
    assert Counter(chosen[-100:]).most_common(1)[0][0] == ends


@pytest.mark.parametrize("costs", [CPU, GPU])
@pytest.mark.parametrize("tokens", [5, 17, 40, 100, 256])
def test_drafts_that_are_never_right_cost_little(costs, tokens, rng):
    schedule = fresh(costs)
    for _ in range(3):
        taken, plain = play(schedule, tokens, 0.0, rng)
        assert taken <= (1 + PROBE) * plain + CREDIT * costs[1] + 1e-9
        assert taken <= 1.05 * plain or tokens < 50
        assert taken <= 1.1 * plain or tokens < 17


@pytest.mark.parametrize(("costs", "least"), [(CPU, 1.3), (GPU, 2.0)])
def test_drafts_that_are_right_are_found(costs, least, rng):
    ratios = [np.divide(*play(fresh(costs), 256, 0.85, rng)[::-1]) for _ in range(20)]
    assert np.median(ratios) >= least


def test_what_a_text_earned_lets_the_next_draft_at_once(rng):
    schedule = fresh(
        {width: cost + 4.0 * (width > 1) for width, cost in CPU.items()}
    )  # beyond a first credit
    assert schedule.choose(AUTO) == 1
    play(schedule, 256, 0.9, rng)
    schedule.begin()
    assert schedule.choose(AUTO) > 1 and schedule.lost >= -EARNED * CPU[1]


def golden_texts():
    """Drafts that would be right at every place of the golden texts: where a round of 16 kept n, behind its
    i-th token about n - i of the next draft are right."""
    for p in range(6):
        rounds = numbers("smollm2-135m-q4_1")[f"p{p}.b16.rounds"].tolist()
        yield [emitted - 1 - i for emitted in rounds for i in range(emitted)]


DEAR = {1: 9.7, 4: 26.8, 8: 45.0, 16: 67.7}  # two cores without AVX-512


@pytest.mark.parametrize("costs", [CPU, GPU, {1: 5.0, 4: 8.6, 8: 10.4, 16: 15.0}, DEAR])
def test_no_fixed_width_is_much_faster_on_the_golden_texts(costs):
    """5 % over all, 10 % on a text of 50 tokens or more."""
    schedule, found = fresh(costs), []
    for right in golden_texts():
        schedule.begin()
        taken = follow(right, schedule, costs)
        found.append((len(right), taken, [follow(right, fixed(width), costs) for width in costs]))
    assert sum(taken for _, taken, _ in found) <= 1.05 * min(np.sum([one for *_, one in found], 0))
    assert all(taken <= 1.1 * min(others) for count, taken, others in found if count >= 50)


def fixed(width):
    return SimpleNamespace(choose=lambda *_: width, learn=lambda *_: None, begin=lambda *_: None)


def follow(right, schedule, costs):
    """Time of a text of which `right` says how many drafts are right at each place."""
    total, at = 0.0, 0
    while at < len(right):
        width = schedule.choose(AUTO)
        accepted = min(right[at], width - 1)
        emitted = min(accepted + 1, len(right) - at)
        schedule.learn(width, accepted, emitted, costs[width])
        total, at = total + costs[width], at + emitted
    return total


def test_a_text_that_turns_bad_falls_back_to_plain_rounds(rng):
    schedule = fresh(CPU)
    play(schedule, 200, 0.9, rng)
    for _ in range(40):
        width = schedule.choose(AUTO)
        schedule.learn(width, 0, 1, CPU[width])
    assert schedule.choose(AUTO) in (1, 4)


def test_plain_rounds_that_become_cheaper_are_noticed(rng):
    """While every round drafts, none says what a plain one costs now."""
    schedule, chosen = fresh(dict.fromkeys(CPU, 20.0)), []
    schedule.begin()
    for _ in range(400):
        width = schedule.choose(AUTO)
        accepted = int(np.argmin(np.append(rng.random(width - 1) < 0.6, False)))
        schedule.learn(width, accepted, accepted + 1, 6.0 if width == 1 else 20.0)
        chosen.append(width)
    assert 1 not in chosen[:64] and chosen[200:].count(1) > 150
    schedule = fresh(CPU)
    total, plain = play(schedule, 2000, 0.95, rng)
    assert total < 0.45 * plain, "rounds that pay are hardly fewer"


def test_a_width_that_was_asked_for_is_taken():
    schedule = Schedule(16)
    assert schedule.choose(SimpleNamespace(verify=7)) == 7
    assert widths(16) == [1, 4, 8, 16] and widths(2) == [1, 2] and widths(1) == [1]


def test_measuring_that_was_cut_short_begins_anew():
    s, calls = Schedule(8), []

    def run(width):
        calls.append(width)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        s.measure(run)
    assert s.seconds == {}
    s.measure(run)
    assert s.seconds == {1: 1.0, 4: 1.0, 8: 1.0}
