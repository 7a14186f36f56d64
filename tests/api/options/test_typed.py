"""What type checkers and `help` say of the options is what the options are."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
from pydantic import create_model

import partway as pw
from partway.options.algo import AlgoParameters
from partway.options.base import FrozenOptions
from partway.options.parallel import ParallelContext
from partway.options.typed import AlgoOptions, ParallelOptions, listed, meanings

PAIRS = [(ParallelOptions, ParallelContext), (AlgoOptions, AlgoParameters)]


@pytest.mark.parametrize(("options", "model"), PAIRS)
def test_the_names_are_those_of_the_fields(options: Any, model: type[FrozenOptions]) -> None:
    assert list(options.__annotations__) == list(model.model_fields)


@pytest.mark.parametrize(("options", "model"), PAIRS)
def test_what_a_type_lists_is_all_that_is_accepted(options: Any, model: type[FrozenOptions]) -> None:
    for name, written in typing.get_type_hints(options).items():
        for kind in (written, *typing.get_args(written)):
            if typing.get_origin(kind) is typing.Literal and name != "dataset_strategy":
                assert set(typing.get_args(kind)) == set(map(str, model.model_fields[name].annotation)), name  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "model"), PAIRS)
def test_every_field_says_what_it_means(options: Any, model: type[FrozenOptions]) -> None:
    said = meanings(model)
    assert [name for name in model.model_fields if not said.get(name)] == []


@pytest.mark.parametrize(
    "function",
    [pw.set_auto_parallel_context, pw.auto_parallel_context, pw.set_algo_parameters],
    ids=lambda f: f.__name__,
)
def test_help_lists_every_option_with_its_type_default_and_meaning(function: Any) -> None:
    model = AlgoParameters if function is pw.set_algo_parameters else ParallelContext
    text = inspect.getdoc(function) or ""
    assert "Raises" in text or "raises" in text
    for name, default in model().model_dump().items():
        line = next(line for line in text.splitlines() if line.startswith(f"    {name}: "))
        assert line.endswith(f" = {default!r}")
    words = " ".join(text.split())
    assert all(" ".join(meaning.split()) in words for meaning in meanings(model).values())


def test_a_model_without_source_is_listed_without_meanings() -> None:
    made = create_model("Made", __base__=FrozenOptions, size=(int, 3))
    kind = typing.TypedDict("kind", {"size": int})  # noqa: UP013
    assert listed(kind, made).splitlines() == ["Options:", "", "    size: <class 'int'> = 3"]
    assert meanings(made) == {}
