"""Holders' shares of an image model, by schedules of its pure scheduler.

`tests.simulator.kind_watch` judges every plan of these schedules, as of the simulator's worlds.
"""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.core.common.turns import Seats, TurnsCore
from engine.core.image_generation.least_times import Shape
from engine.core.image_generation.scheduler import ImageGenerationScheduler
from engine.core.image_generation.types import Verb
from engine.core.image_generation.usual_times import UsualTimes
from tests.simulator.mutants import Mutant, any_fails, planted
from tests.support.examples import examples
from tests.support.image_generation_driver import ImageGenerationDriver


class Artist:
    """A scheduler of drawings on a machine whose steps take as long as their pixels need."""

    def __init__(self, **config):
        self.driver = ImageGenerationDriver(
            **{"max_drawings": 4, "max_queued_tokens": 10**6} | config
        )
        self.count = 0
        self.seconds = Counter()  # by holder

    def ask(self, holder, *, size=16, weight=1, **fields):
        """Submit a drawing of a holder."""
        self.count += 1
        name, fields = f"d{self.count}", {"width": size, "height": size} | fields
        self.driver.submit(name, holder=holder, weight=weight, arrival=self.driver.now, **fields)
        return name

    def step(self):
        """Compute one step, and return its holder; None without a step."""
        if self.driver.begin_step() is None:
            return None
        [(live, part)] = self.driver.scheduler._step.rows
        drawing, holder = live.request.drawing, live.request.holder
        seconds = 1e-5 * drawing.width * drawing.height * drawing.num_images
        if part.verb is Verb.ENCODE:
            seconds = 1e-3
        self.seconds[holder] += seconds
        self.driver.now += seconds
        self.driver.end_step()
        return holder


@settings(max_examples=examples(25), deadline=None)
@given(
    asked=st.lists(
        st.tuples(
            st.integers(1, 3),  # weight
            st.integers(1, 4),  # drawings at a time
            st.sampled_from([8, 16, 72]),
            st.integers(1, 9),  # steps
            st.integers(1, 2),  # images
        ),
        min_size=2,
        max_size=8,
    ),
    seats=st.integers(1, 4),
    buffer=st.sampled_from([2, 1000]),
    interventions=st.lists(
        st.tuples(st.integers(0, 100), st.sampled_from(["cancel", "burst", "read"])), max_size=8
    ),
)
def test_busy_holders_of_drawings_have_equal_shares(asked, seats, buffer, interventions):
    """The watcher judges every plan; and nobody waits for ever."""
    artist, live = Artist(max_drawings=seats), {}
    driver = artist.driver

    def ask(index):
        weight, _, size, steps, images = asked[index]
        fields = {"size": size, "weight": weight, "steps": steps, "n": images, "buffer": buffer}
        live[artist.ask(f"h{index}", **fields)] = index

    for index, (_, streams, _, _, _) in enumerate(asked):
        for _ in range(streams):
            ask(index)
    for number in range(100):
        for at, what in interventions:
            if at == number:
                name = sorted(live)[number % len(live)]
                if what == "cancel":
                    driver.cancel(name)
                elif what == "burst":
                    for _ in range(10):
                        ask(live[name])
                else:
                    driver.read(name)
        if artist.step() is None:
            for name in list(driver.requests):
                driver.read(name)
        driver.scheduler.check()
        ended = driver.finished.keys()
        for name in sorted(live.keys() & ended):
            index = live.pop(name)
            if len(live) < 40:
                ask(index)
    while driver.scheduler._requests:
        for name in list(driver.requests):
            driver.read(name)
        artist.step()
    driver.check_idle()
    driver.check_ends()


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 5)])
def test_drawings_of_any_size_and_number_have_their_time(weights):
    """One holder has many small drawings, another one large drawing after another."""
    artist = Artist()
    for _ in range(90):  # they have more steps than are taken
        artist.ask("many", weight=weights[0], steps=50)
    name = artist.ask("one", size=72, weight=weights[1], steps=9)
    for number in range(4000):
        if number == 400:
            artist.seconds.clear()
        artist.step()
        if name in artist.driver.finished:
            name = artist.ask("one", size=72, weight=weights[1], steps=9)
    ratio = artist.seconds["many"] / artist.seconds["one"]
    assert ratio == pytest.approx(weights[0] / weights[1], rel=0.1)


def test_a_drawing_begins_though_another_holder_has_all_seats():
    artist = Artist()
    for _ in range(40):
        artist.ask("many", steps=50)
    for _ in range(40):
        artist.step()
    artist.ask("one")
    assert "one" in [artist.step() for _ in range(2)]
    for _ in range(9):
        artist.ask("one", steps=50)
    for _ in range(50):
        artist.step()
    seated = Counter(live.request.holder for live in artist.driver.scheduler._seats)
    assert seated == {"many": 4, "one": 2}  # its part, while the other keeps its seats


def test_drawings_of_one_holder_are_never_counted():
    artist = Artist()
    for _ in range(3):
        artist.ask("one")
    for _ in range(9):
        artist.step()
    [share] = artist.driver.scheduler.shares.in_order()
    assert share.counter == 0.0


def test_drawings_of_a_holder_take_turns():
    artist = Artist()
    names = [artist.ask("many", steps=50) for _ in range(2)]
    artist.ask("one", steps=50)
    for _ in range(40):
        artist.step()
    done = [artist.driver.scheduler._requests[name].num_done for name in names]
    assert abs(done[0] - done[1]) <= 1


def test_a_shape_that_was_not_measured_costs_by_its_size():
    times = UsualTimes()
    small, large = Shape(Verb.DENOISE, 100, 2), Shape(Verb.DENOISE, 400, 3)
    assert times.price(large) == pytest.approx(6 * times.price(small))
    for seconds in (5.0, 0.1, 0.1):
        times.note(small, seconds)
    times.note(Shape(Verb.DECODE, 400, 3), 9.0)
    times.note(Shape(Verb.ENCODE, 0, 3), 9.0)
    assert times.price(Shape(Verb.ENCODE, 400, 3)) == pytest.approx(0.0012)
    assert times.price(small) == 0.1
    assert times.price(large) == pytest.approx(0.6)


# ---- planted bugs ------------------------------------------------------------------------------

BUGS = (
    Mutant(
        "drawings cost alike",
        ImageGenerationScheduler._price_of,
        "self._prices.price(shape_of(live.request, live.part.verb))",
        "1.0",
    ),
    Mutant("drawings are not charged", TurnsCore._choose, "self.shares.charge(prices)", "pass"),
    Mutant(
        "a holder has all seats",
        Seats._next_to_seat,
        "if has_room or seats[first] < part",
        "if has_room",
    ),
    Mutant(
        "a holder takes seats that others keep",
        Seats._next_to_seat,
        "if has_room or seats[first] < part",
        "if True",
    ),
    Mutant(
        "steps of any size cost alike until they are measured",
        UsualTimes.price,
        "* _size(shape) / _size(near)",
        "",
    ),
    Mutant(
        "a holder's first drawing has all its steps",
        Seats._first_able,
        "live.share.turn = live.rank",
        "pass",
    ),
)
CHECKS = (
    lambda: test_drawings_of_any_size_and_number_have_their_time((1, 1)),
    test_a_drawing_begins_though_another_holder_has_all_seats,
    test_drawings_of_a_holder_take_turns,
    test_a_shape_that_was_not_measured_costs_by_its_size,
)


@pytest.mark.quick(2)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title)
def test_a_planted_bug_is_found(bug):
    with planted(bug):
        assert any_fails(CHECKS)
