"""Names suggested for one that does not exist."""

import pytest

from partway.strategy.basics.suggest import did_you_mean, either, nearest, there_are

NAMES = ["up.weight", "up.bias", "down.weight"]


def test_the_closest_name_comes_first() -> None:
    assert nearest("up.weigth", NAMES) == ["up.weight", "down.weight"]


def test_at_most_as_many_names_as_asked_for_are_suggested() -> None:
    assert nearest("up.weigth", NAMES, most=1) == ["up.weight"]


def test_close_names_are_suggested() -> None:
    assert did_you_mean("up.weigth", NAMES) == "did you mean 'up.weight' or 'down.weight'?"


def test_short_names_may_differ_in_half_of_their_letters() -> None:
    assert did_you_mean("pp", ["dp", "tp"], most=1) == ""
    assert did_you_mean("pp", ["dp", "tp"], most=1, close=0.5) == "did you mean 'tp'?"


def test_without_a_close_name_the_message_says_something_else() -> None:
    assert did_you_mean("head", NAMES, there_are("parameters", NAMES)) == (
        "the parameters are 'up.weight', 'up.bias', 'down.weight'"
    )


def test_of_many_names_the_first_six_are_listed() -> None:
    assert there_are("modules", map(str, range(7))) == "the modules are '0', '1', '2', '3', '4', '5', ..."
    assert there_are("modules", map(str, range(6))) == "the modules are '0', '1', '2', '3', '4', '5'"


def test_no_names_are_said_to_be_none() -> None:
    assert there_are("modules", []) == "there are no modules"


@pytest.mark.parametrize(("choices", "text"), [([1], "1"), ([1, 2], "1 or 2"), ([1, 2, 3], "1, 2 or 3")])
def test_choices_are_joined_by_or(choices: list[int], text: str) -> None:
    assert either(choices) == text
