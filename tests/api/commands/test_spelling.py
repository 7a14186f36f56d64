"""What is written on a command line: what it stands for, and where it stops being that."""

from __future__ import annotations

import math

import pytest

from partway.commands.spelling import Strategy, bytes_of, input_of, mesh_of, strategy_of
from partway.strategy import StrategyError

DTYPES = ("float32", "float16", "bfloat16", "int64", "bool")
WRITE = "write an entry per dim, an axis, several in parentheses or None, such as dp,None or (dp,tp),None; or auto"


@pytest.mark.parametrize(
    ("text", "mesh"), [("dp=2,tp=4", {"dp": 2, "tp": 4}), (" dp = 8 ", {"dp": 8}), ("x=0", {"x": 0})]
)
def test_a_mesh_is_axes_with_their_sizes(text: str, mesh: dict[str, int]) -> None:
    assert mesh_of(text) == mesh


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp=2,tp", "--mesh 'dp=2,tp': axis 2, 'tp', is not NAME=SIZE; write the axes as in dp=2,tp=4"),
        ("dp=-2", "--mesh 'dp=-2': axis 1, 'dp=-2', is not NAME=SIZE; write the axes as in dp=2,tp=4"),
        ("dp=2,", "--mesh 'dp=2,': axis 2, '', is not NAME=SIZE; write the axes as in dp=2,tp=4"),
        ("dp=2,dp=4", "--mesh 'dp=2,dp=4': the axis 'dp' is there twice; give each its own name"),
    ],
)
def test_what_is_no_mesh_is_an_error(text: str, says: str) -> None:
    with pytest.raises(StrategyError) as error:
        mesh_of(text)
    assert str(error.value) == says


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("dp,None", ("dp", None)),
        (" dp , None ", ("dp", None)),
        ("(dp,tp),None", (("dp", "tp"), None)),
        ("None,(dp)", (None, ("dp",))),
        ("2,1", (2, 1)),
        ("dp", ("dp",)),
        ("()", ()),
        ("auto", None),
    ],
)
def test_a_strategy_has_an_entry_for_each_dim(text: str, strategy: Strategy) -> None:
    assert strategy_of("--in", text) == strategy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "an entry is missing (character 1)"),
        ("dp,,None", "an entry is missing (character 4)"),
        ("dp,", "an entry is missing (character 4)"),
        ("(dp,tp", "a ')' is missing (character 7)"),
        ("(dp (", "a ')' is missing (character 5)"),
        ("dp)", "')' closes nothing (character 3)"),
        ("dp tp", "'tp' is not after a comma (character 4)"),
        ("dp;tp", "';' is no part of a strategy (character 3)"),
        ("dp, 'tp'", '"\'" is no part of a strategy (character 5)'),
        ("2x,None", "'2x' is neither the name of an axis nor a number of parts (character 1)"),
        ("(dp, None)", "None stands in parentheses, which are for several axes of one dim (character 6)"),
        ("()x", "an entry is missing (character 2)"),
    ],
)
def test_what_is_no_strategy_is_an_error_that_says_where(text: str, why: str) -> None:
    with pytest.raises(StrategyError) as error:
        strategy_of("--in", text)
    assert str(error.value) == f"--in {text!r}: {why}; {WRITE}"


@pytest.mark.parametrize(
    ("text", "tensor"),
    [
        ("float32[16,64]", ("", "float32", (16, 64))),
        ("mask=bool[8]", ("mask", "bool", (8,))),
        (" int64[ 8, 128 ] ", ("", "int64", (8, 128))),
        ("float32[]", ("", "float32", ())),
    ],
)
def test_an_input_is_a_dtype_with_sizes(text: str, tensor: tuple[str, str, tuple[int, ...]]) -> None:
    assert input_of(text, DTYPES) == tensor


@pytest.mark.parametrize("text", ["float32", "float32[16,]", "float32[-1]", "[16]", "float32[16]x", "2=float32[1]"])
def test_what_is_no_input_is_an_error(text: str) -> None:
    with pytest.raises(StrategyError) as error:
        input_of(text, DTYPES)
    assert str(error.value) == (
        f"--input {text!r} is not DTYPE[SIZES]; write it as in float32[16,64], int64[8,128] or mask=bool[16]"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int46[1]", "there is no dtype 'int46'; did you mean 'int64'?"),
        ("qq[1]", "there is no dtype 'qq'; write one of PyTorch's, such as float32, bfloat16 or int64"),
    ],
)
def test_an_unknown_dtype_is_an_error(text: str, says: str) -> None:
    with pytest.raises(StrategyError) as error:
        input_of(text, DTYPES)
    assert str(error.value) == f"--input {text!r}: {says}"


@pytest.mark.parametrize(
    ("text", "size"), [("40GB", 40e9), ("40e9", 40e9), ("1.5 tb", 1.5e12), ("inf", math.inf), ("7", 7.0)]
)
def test_bytes_are_a_number_with_a_unit_or_without(text: str, size: float) -> None:
    assert bytes_of("--memory-limit", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "40XB", "1.2.3", "nan", "GB"])
def test_what_is_no_number_of_bytes_is_an_error(text: str) -> None:
    with pytest.raises(StrategyError) as error:
        bytes_of("--memory-limit", text)
    assert str(error.value) == (
        f"--memory-limit {text!r} is no number of bytes above 0; write 40e9, inf or 40GB (B, KB, MB, GB or TB)"
    )
