"""What requests under way will come to, in examples that can be followed by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from draco_ray.judging.reply_sizes import CUTS, EXPONENTS, LEARNED_AFTER, LEARNED_AFTER_ALL, MEMORY, Size, Sizes
from draco_ray.records import FloatArray

T: FloatArray = EXPONENTS / EXPONENTS[-1]
"""t of the bound: with this limit the largest is 1, at which a sum that is sure is bounded most closely."""
RISK = math.log(1e4)
WITHIN = 60.0
SHORT, LONG, CUT = (5.0, 10.0), (20.0, 100.0), (50.0, 1000.0)
"""Seconds and tokens of replies that have ended."""


def reply(seconds: float = 0.0, *, kind: str = "", most: float = 1000.0) -> Size:
    return Size(kind=kind, group="", input_bytes=0.0, most_output=most, seconds=seconds)


def prompt(of: float = 1000.0, *, group: str = "") -> Size:
    """A request whose reply is nothing, with so many bytes."""
    return Size(kind="", group=group, input_bytes=of, most_output=0.0)


def learned(ended: Iterable[tuple[float, float]], *, most: float = 1000.0) -> Sizes:
    sizes = Sizes(EXPONENTS[-1])
    for seconds, tokens in ended:
        sizes.add(reply(seconds, most=most), input_tokens=0.0, output_tokens=tokens)
    return sizes


def read(*tokens: float, group: str = "", into: Sizes | None = None) -> Sizes:
    """After prompts of 1000 bytes of so many tokens each."""
    sizes = into or Sizes(EXPONENTS[-1])
    for each in tokens:
        sizes.add(prompt(group=group), input_tokens=each, output_tokens=0.0)
    return sizes


def growth(sizes: Sizes, *under_way: Size) -> FloatArray:
    return sizes.under_way(under_way, WITHIN).growth_T


def mean_of(*sizes: tuple[float, float]) -> FloatArray:
    """log E[exp(t X)] of X by shares and tokens."""
    found: FloatArray = np.logaddexp.reduce([math.log(share) + tokens * T for share, tokens in sizes])
    return found


def least(growth_T: FloatArray, risk: float = RISK) -> float:
    return float(((growth_T + risk) / T).min())


def bounded(growth_T: FloatArray, surplus: float, count: int, ended: int) -> float:
    """The bound where none of so many that have ended ran to its cut: with as many that do as cannot be excluded."""
    found, chance = least(growth_T), 1.0
    for number in range(count):
        chance *= min(1.0, (count - number) / (ended + 1 + number))
        if number == 0 or chance >= 1e-3:
            found = max(found, least(growth_T, max(0.0, math.log(chance / 3e-2))) + (number + 1) * surplus)
    return found


def test_what_is_not_known_counts_with_the_most() -> None:
    # Before any has ended each has been written for longer than all that have.
    assert learned([]).under_way([reply(0.5), reply()], WITHIN).cut == 1
    few = learned([SHORT] * (LEARNED_AFTER_ALL - 1))
    one = Size(kind="", group="", input_bytes=200.0, most_output=1000.0)
    assert few.expect(one) == 1200.0
    under_way = few.under_way([one, reply()], WITHIN)
    assert (under_way.count, under_way.most, under_way.surplus, under_way.cut) == (2, 2200.0, 0.0, 0)
    assert under_way.growth_T == pytest.approx(2200 * T)
    writing, sum_T = under_way.replies[""]
    assert (writing, sum_T) == (2, pytest.approx(math.log(2) + 1000 * T))
    assert (few.bound(under_way), few.bound(under_way, one)) == (2200.0, 3400.0)
    few.add(reply(*SHORT[:1]), input_tokens=0.0, output_tokens=10.0)
    assert few.expect(one) == 210.0
    # Of another kind too few have ended.
    for _ in range(LEARNED_AFTER):
        assert few.expect(reply(kind="credit")) == 1000.0
        few.add(reply(kind="credit"), input_tokens=0.0, output_tokens=30.0)
    assert few.expect(reply(kind="credit")) == 30.0
    # No request is expected to use more than it may.
    assert few.expect(reply(kind="credit", most=20.0)) == 20.0


def test_replies_that_are_all_alike_are_bounded_by_their_sum_and_one_that_runs_to_its_cut() -> None:
    sizes = learned([SHORT] * 400)
    two = sizes.under_way([reply(), reply()], WITHIN)
    assert two.growth_T == pytest.approx(20 * T)
    assert (two.count, two.most, two.surplus, two.cut) == (2, 2000.0, 990.0, 0)
    assert sizes.bound(two) == pytest.approx(20 + 990)
    assert sizes.bound(two, reply()) == pytest.approx(30 + 990)
    # One that may write more exceeds the mean by more.
    assert sizes.bound(two, reply(most=1500.0)) == pytest.approx(30 + 1490)
    assert sizes.bound(sizes.under_way([reply(), reply(most=1500.0)], WITHIN)) == pytest.approx(20 + 1490)
    # Never more than all of them may write.
    assert sizes.under_way([reply(most=5.0)], WITHIN).surplus == 0.0
    assert sizes.bound(sizes.under_way([reply(most=10.5)] * 2, WITHIN)) == 21.0
    assert sizes.bound(sizes.under_way([reply(most=10.5)], WITHIN), reply(most=10.25)) == 20.75
    nothing = sizes.under_way([], WITHIN)
    assert (sizes.bound(nothing), sizes.bound(nothing, reply())) == (0.0, 10 + 990)


def test_there_is_room_for_as_many_cuts_at_once_as_too_few_have_ended_to_exclude() -> None:
    """Laplace: that both of two replies run to their cut after none of 43 did has a chance of 2/44 of 1/45."""
    assert 2 / 44 / 45 > 1e-3 > 2 / 45 / 46
    for ended, bound in ((43, 20 + 2 * 990), (44, 20 + 990 + math.log(2 / 45 / 3e-2)), (70, 20 + 990)):
        sizes = learned([SHORT] * ended)
        assert sizes.bound(sizes.under_way([reply(), reply()], WITHIN)) == pytest.approx(bound)
    # Of a hundred four may: 100/401 of 99/402 of 98/403 of 97/404 is more than one in a thousand, a fifth is not.
    for most, bound in ((14.0, 1000 + 4 * 4), (12.0, 1000 + RISK)):
        sizes = learned([SHORT] * 400, most=most)
        assert sizes.bound(sizes.under_way([reply(most=most)] * 100, WITHIN)) == pytest.approx(bound)
    # More under way than have ended: the chance of a single one is 1, and no more.
    sizes = learned([SHORT] * 40)
    assert sizes.bound(sizes.under_way([reply()] * 60, WITHIN)) == pytest.approx(bounded(600 * T, 990, 60, 40))


def test_a_reply_that_has_been_written_for_a_while_is_like_those_that_took_longer() -> None:
    sizes = learned([SHORT, LONG] * 200)
    half = mean_of((0.5, 10), (0.5, 100))
    assert growth(sizes, reply(0.0)) == pytest.approx(half)
    assert growth(sizes, reply(4.9)) == pytest.approx(half)
    assert growth(sizes, reply(5.0)) == pytest.approx(100 * T)
    assert growth(sizes, reply(19.0)) == pytest.approx(100 * T)
    assert growth(sizes, reply(20.0)) == pytest.approx(1000 * T)
    assert growth(sizes, reply(0.0), reply(5.0), reply(20.0)) == pytest.approx(half + 1100 * T)
    # Never more than it may write.
    assert growth(sizes, reply(0.0, most=50.0)) == pytest.approx(np.minimum(half, 50 * T))
    assert growth(sizes, reply(5.0, most=50.0)) == pytest.approx(50 * T)


def test_what_is_too_small_beside_the_longest_is_still_a_number() -> None:
    sizes = learned([(5.0, 1000.0), (20.0, 10.0)] * 100, most=2000.0)
    found = growth(sizes, reply(5.0, most=2000.0))
    # Beyond e^690 only a bound of it.
    assert np.where(T < 0.6, found, 10 * T) == pytest.approx(10 * T)
    assert np.isfinite(found).all()
    assert (found[T > 0.8] > 10).all()


@pytest.mark.parametrize(("long", "tokens"), [(2, 1000), (3, 100)])
def test_fewer_than_three_that_took_longer_say_nothing(long: int, tokens: int) -> None:
    sizes = learned([LONG] * long + [SHORT] * (200 - long))
    assert growth(sizes, reply(5.0)) == pytest.approx(tokens * T)


def test_the_latest_count_alone_where_they_are_longer() -> None:
    longer = learned([SHORT] * 60 + [LONG] * 20 + [SHORT, LONG] * 10)
    assert growth(longer, reply()) == pytest.approx(mean_of((0.25, 10), (0.75, 100)))
    shorter = learned([LONG] * 60 + [SHORT] * 40)
    assert growth(shorter, reply()) == pytest.approx(mean_of((0.4, 10), (0.6, 100)))
    # One that is being written is compared with all that took longer.
    assert growth(longer, reply(5.0)) == pytest.approx(100 * T)
    assert longer.expect(reply()) == pytest.approx(0.7 * 10 + 0.3 * 100)


def test_replies_of_long_ago_are_forgotten() -> None:
    sizes = learned([LONG] * 100 + [SHORT] * (MEMORY - 1))
    assert growth(sizes, reply(5.0)) == pytest.approx(1000 * T)
    assert sizes.expect(reply()) == pytest.approx(10 + 90 / MEMORY)
    sizes.add(reply(5.0), input_tokens=0.0, output_tokens=10.0)
    assert growth(sizes, reply()) == pytest.approx(10 * T)


def test_what_was_sent_a_minute_ago_counts_no_more_but_says_how_long_replies_are() -> None:
    sizes = learned([SHORT, LONG] * 200, most=120.0)
    old, new = reply(WITHIN, most=120.0), reply(most=120.0)
    found = sizes.under_way([new, old, reply(WITHIN - 0.1, kind="credit", most=7.0)], WITHIN)
    half = mean_of((0.5, 10), (0.5, 100))
    # The old one and that of another kind have been written for longer than any that has ended.
    assert (found.count, found.most, found.cut) == (2, 127.0, 2)
    chance = (2 + 1) / (400 + 2 + 1)
    cut = np.log((1 - chance) * np.exp(half) + chance * np.exp(120 * T))
    assert found.growth_T == pytest.approx(cut + 7 * T)
    assert {kind: count for kind, (count, _) in found.replies.items()} == {"": 2, "credit": 1}
    assert found.replies[""][1] == pytest.approx(np.log(np.exp(half) + np.exp(120 * T)))
    assert found.surplus == 120 - 55


def test_one_more_is_like_those_that_have_ended_and_those_under_way() -> None:
    """Short replies end first."""
    sizes = learned([SHORT, LONG] * 30, most=120.0)
    for seconds, tokens in [SHORT, LONG] * 30:
        sizes.add(reply(seconds, kind="credit", most=120.0), input_tokens=0.0, output_tokens=tokens)
    found = sizes.under_way([reply(5.0, most=120.0)] * 40, WITHIN)
    assert found.growth_T == pytest.approx(4000 * T)
    # 30 of 10 tokens and 30 of 100 have ended, 40 that are being written are of 100.
    new = mean_of((0.3, 10), (0.7, 100))
    assert sizes.bound(found, reply(most=120.0)) == pytest.approx(bounded(4000 * T + new, 65, 41, 120))
    # Of a kind of which none is under way those that have ended are all that is known.
    half = mean_of((0.5, 10), (0.5, 100))
    another = sizes.bound(found, reply(kind="credit", most=120.0))
    assert another == pytest.approx(bounded(4000 * T + half, 65, 41, 120))
    young = sizes.under_way([reply(most=120.0)] * 40, WITHIN)
    assert sizes.bound(young) == pytest.approx(bounded(40 * half, 65, 40, 120))


def test_a_reply_may_run_to_its_cut_as_often_as_others_did_and_the_longer_it_takes_the_more_likely() -> None:
    sizes = learned([*[SHORT] * 5, *[LONG] * 3, *[CUT] * 2] * 10)
    chance = 21 / 101

    def cut(chance: float, *shares: tuple[float, float]) -> FloatArray:
        return mean_of(*((share * (1 - chance), tokens) for share, tokens in shares), (chance, 1000))

    assert growth(sizes, reply()) == pytest.approx(cut(chance, (0.5, 10), (0.3, 100), (0.2, 1000)))
    # Half of them took longer.
    assert growth(sizes, reply(5.0)) == pytest.approx(cut(chance / 0.5, (0.6, 100), (0.4, 1000)))
    assert growth(sizes, reply(5.0), reply()) == pytest.approx(growth(sizes, reply(5.0)) + growth(sizes, reply()))
    # Of another kind, none of which has run to its cut.
    for _ in range(20):
        sizes.add(reply(5.0, kind="credit"), input_tokens=0.0, output_tokens=10.0)
    assert growth(sizes, reply(kind="credit")) == pytest.approx(cut(21 / 121, (1.0, 10)))
    alone = sizes.bound(sizes.under_way([], WITHIN), reply(kind="credit"))
    assert alone == pytest.approx(10 + 990)
    # Where few took longer the chance would be more than 1, of which 0.999 are left.
    for _ in range(3):
        sizes.add(reply(20.0, kind="credit"), input_tokens=0.0, output_tokens=100.0)
    assert 21 / 124 / (3 / 23) > 1
    assert growth(sizes, reply(5.0, kind="credit")) == pytest.approx(cut(0.999, (1.0, 100)))
    # What has been written for longer than any before seems to run to its cut as well.
    writing = sizes.under_way([reply(51.0), reply(51.0)], WITHIN)
    assert writing.cut == 2
    one_more = sizes.under_way([reply(51.0), reply(51.0), reply(5.0)], WITHIN)
    assert one_more.growth_T == pytest.approx(2000 * T + cut((21 + 2) / (123 + 2 + 1) / 0.5, (0.6, 100), (0.4, 1000)))


def test_one_more_may_run_to_its_cut_as_well() -> None:
    sizes = learned([*[SHORT] * 9, (5.0, 14.0)] * 30, most=14.0)
    found = sizes.under_way([reply(most=14.0)] * 100, WITHIN)
    chance = 31 / 301
    one = mean_of((0.9 * (1 - chance), 10), (0.1 * (1 - chance) + chance, 14))
    assert found.growth_T == pytest.approx(100 * one)
    assert sizes.bound(found, reply(most=14.0)) == pytest.approx(bounded(101 * one, 14 - 10.4, 101, 300))


@pytest.mark.parametrize(("tokens", "cuts"), [(979.0, False), (980.0, True)])
def test_a_reply_of_nearly_the_most_ran_to_its_cut(tokens: float, cuts: bool) -> None:
    sizes = learned([SHORT] * 60 + [(5.0, tokens)] + [SHORT] * 60)
    assert (growth(sizes, reply(kind="", most=2000.0))[-1] > 1000) == cuts


def test_what_ran_to_its_cut_a_thousand_requests_ago_is_forgotten() -> None:
    sizes = learned([CUT])
    for _ in range(20):
        sizes.add(reply(5.0, kind="credit"), input_tokens=0.0, output_tokens=10.0)
    # A request that may write nothing does not run to its cut.
    for _ in range(CUTS - 21):
        sizes.add(reply(most=0.0), input_tokens=0.0, output_tokens=0.0)
    chance = 2 / 1001
    assert growth(sizes, reply(kind="credit")) == pytest.approx(mean_of((1 - chance, 10), (chance, 1000)))
    sizes.add(reply(most=0.0), input_tokens=0.0, output_tokens=0.0)
    assert growth(sizes, reply(kind="credit")) == pytest.approx(10 * T)
    # Nor does it say anything of the replies of its kind.
    assert sizes.expect(reply()) == 1000.0


def test_a_prompt_is_a_token_a_byte_until_a_dozen_have_said_otherwise() -> None:
    sizes = read(*[200.0, 300.0] * 5, 250.0)
    assert sizes.expect(prompt()) == 1000.0
    read(250.0, into=sizes)
    assert sizes.expect(prompt(2000.0)) == pytest.approx(500.0)
    # Mean 0.25 and variance 10/12 of 0.0025, as if it were normally distributed, and never more than one a byte.
    normal = 500 * T + 0.5 * (0.0025 * 10 / 12) * (2000 * T) ** 2
    assert growth(sizes, prompt(2000.0)) == pytest.approx(np.minimum(2000 * T, normal))
    assert growth(sizes, prompt(2000.0), prompt(2000.0)) == pytest.approx(2 * np.minimum(2000 * T, normal))
    nothing = sizes.under_way([], WITHIN)
    bound = least(np.minimum(2000 * T, normal))
    assert sizes.bound(nothing, prompt(2000.0)) == pytest.approx(bound)
    assert bound < 2000


def test_the_latest_prompts_weigh_a_three_hundredth() -> None:
    sizes = read(*[200.0] * MEMORY)
    assert sizes.expect(prompt()) == pytest.approx(200.0)
    read(500.0, into=sizes)
    assert sizes.expect(prompt()) == pytest.approx(200 + 300 / MEMORY)
    variance = (1 - 1 / MEMORY) * 0.3**2 / MEMORY
    normal = (200 + 300 / MEMORY) * T + 0.5 * variance * (1000 * T) ** 2
    assert growth(sizes, prompt()) == pytest.approx(np.minimum(1000 * T, normal))


def test_a_prompt_is_measured_by_the_latest_of_its_group() -> None:
    sizes = Sizes(EXPONENTS[-1])
    # The second prompt of a group has as many tokens a byte as the first, or half as many again.
    for number in range(LEARNED_AFTER - 1):
        read(200.0, 300.0 if number % 2 else 200.0, group=str(number), into=sizes)
    read(250.0, into=sizes)
    assert sizes.expect(prompt(group="1")) == sizes.expect(prompt())
    read(200.0, 300.0, group="last", into=sizes)
    assert sizes.expect(prompt(group="1")) == pytest.approx(300 * 1.25)
    assert sizes.expect(prompt(group="0")) == pytest.approx(200 * 1.25)
    normal = 375 * T + 0.5 * (0.3**2 * 0.25**2) * (1000 * T) ** 2
    assert growth(sizes, prompt(group="1")) == pytest.approx(np.minimum(1000 * T, normal))
    # Without a group, or of one that is new, as all of them.
    overall = (12 * 200 + 6 * 200 + 6 * 300 + 250) / 25
    assert sizes.expect(prompt(group="new")) == sizes.expect(prompt()) == pytest.approx(overall)


def test_groups_of_long_ago_are_forgotten() -> None:
    sizes = Sizes(EXPONENTS[-1])
    read(*[100.0] * (LEARNED_AFTER + 1), group="same", into=sizes)
    read(500.0, group="old", into=sizes)
    for number in range(MEMORY - 2):
        read(100.0, group=str(number), into=sizes)
    # It has been used since, so that another one is the oldest.
    read(100.0, group="same", into=sizes)
    assert sizes.expect(prompt(group="old")) == pytest.approx(500.0)
    read(100.0, group="one more", into=sizes)
    assert sizes.expect(prompt(group="old")) < 200
    assert sizes.expect(prompt(group="same")) == pytest.approx(100.0)


def test_prompt_and_reply_are_added_up() -> None:
    sizes = Sizes(EXPONENTS[-1])
    for _ in range(100):
        both = Size(kind="", group="", input_bytes=400.0, most_output=1000.0, seconds=5.0)
        sizes.add(both, input_tokens=100.0, output_tokens=10.0)
    request = Size(kind="", group="", input_bytes=400.0, most_output=1000.0)
    assert sizes.expect(request) == pytest.approx(110.0)
    # However small they are.
    least = Size(kind="score", group="", input_bytes=1.0, most_output=1.0, seconds=5.0)
    small = Sizes(EXPONENTS[-1])
    for tokens in [0.5, 1.0] * 20:
        small.add(least, input_tokens=0.5, output_tokens=tokens)
    assert small.expect(least) == pytest.approx(0.5 + 0.75)
    chance = 21 / 41
    one = mean_of((0.5 * (1 - chance), 0.5), (0.5 * (1 - chance) + chance, 1.0))
    assert growth(small, replace(least, seconds=0.0)) == pytest.approx(0.5 * T + one)
    found = sizes.under_way([request], WITHIN)
    assert (found.growth_T, found.most) == (pytest.approx(110 * T), 1400.0)
    assert sizes.bound(found, request) == pytest.approx(220 + 990)
