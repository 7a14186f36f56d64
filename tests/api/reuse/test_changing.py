"""Which numbers change is learned from calls that differ in nothing else."""

from __future__ import annotations

from typing import Any

import torch

from partway.propagation.graph.structure import Call, flatten_call
from partway.reuse.changing import Numbers
from partway.reuse.replanning import Signature

X = torch.ones(2)


def call_of(*args: Any) -> Call:
    return flatten_call(lambda *args: None, args, {})


def signature(call: Call, mode: int = 0) -> Signature:
    return Signature(call.structure.key(), (), (None, None), (), (), False, (mode,), ())


def learned(numbers: Numbers, *calls: tuple[Any, ...], mode: int = 0) -> bool:
    """Whether the last of `calls` teaches something."""
    *before, now = (call_of(*each) for each in calls)
    return numbers.learn(now, numbers.of(now), signature(numbers.of(now), mode), [*map(signature, before)])


def test_a_number_that_changed_comes_as_a_tensor() -> None:
    numbers = Numbers()
    assert learned(numbers, (X, 5, [7, "a"]), (X, 5, [8, "a"]))
    call = numbers.of(call_of(X, 5, [9, "a"]))
    assert call.names == ("arg0", "numbers[0]")
    assert [int(tensor) for tensor in call.tensors[1:]] == [9]
    assert call.paths == ((2,),)
    (args, _) = call.build(call.tensors)
    assert args[1:] == (5, [9, "a"])


def test_others_stay_as_they_are() -> None:
    numbers = Numbers()
    assert learned(numbers, (X, 5, "a"), (X, 6, "a"))
    for other in ((X, 5, "b"), (X, 1, "a"), (X, True, "a"), (X, 5.0, "a"), (X, "a"), (5, X, "a")):
        assert numbers.of(call_of(*other)).numbers == 0


def test_calls_that_differ_in_more_teach_nothing() -> None:
    numbers = Numbers()
    for one, other in (((X, 5, "a"), (X, 6, "b")), ((X, 5), (X, 5.0)), ((X, 1), (X, 2)), ((X, 5), (X, 5, 6))):
        assert not learned(numbers, one, other)
    assert not learned(numbers, (X, 5), (X, 6), mode=1)


def test_a_second_number_is_learned_later() -> None:
    numbers = Numbers()
    assert learned(numbers, (X, 5, 7), (X, 6, 7))
    before = signature(call_of(X, 5, 7))
    now = call_of(X, 9, 8)
    assert numbers.learn(now, numbers.of(now), signature(numbers.of(now)), [before])
    assert numbers.of(now).paths == ((1,), (2,))


def test_what_was_refused_is_not_learned_again() -> None:
    numbers = Numbers()
    assert learned(numbers, (X, 5), (X, 6))
    numbers.refuse(numbers.of(call_of(X, 6)))
    assert numbers.of(call_of(X, 6)).numbers == 0
    assert not learned(numbers, (X, 5), (X, 6))
