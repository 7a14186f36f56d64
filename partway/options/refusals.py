"""From pydantic's errors to one error in the user's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from partway.options.base import FrozenOptions
from partway.strategy.basics.choice import Choice
from partway.strategy.basics.suggest import did_you_mean
from partway.strategy.errors import ContextError, StrategyError, shown


def _refusal(value: object, accepts: str) -> str:
    return f"got {shown(value, 80)} ({type(value).__name__}); accepts {accepts}"


def _accepts(field: FieldInfo) -> str:
    if field.description:
        return field.description
    kind = field.annotation
    assert isinstance(kind, type) and issubclass(kind, Choice | bool), f"{field} has no description"
    return "True or False" if kind is bool else f"one of {', '.join(map(repr, kind))}"


def _nested(field: FieldInfo) -> type[FrozenOptions] | None:
    """The options inside a field whose type is options."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, FrozenOptions) else None


def unknown_option(options: type[FrozenOptions], key: object, path: str) -> str:
    """The problem of `key`, written as `path`, which is not one of `options`."""
    if key in options.absent:
        return f"{path} is MindSpore's and not an option here: {options.absent[str(key)]}"
    meant = did_you_mean(str(key), options.model_fields)
    every = ", ".join(options.model_fields)
    return f"{path} is not an option" + (f"; {meant}" if meant else "") + f" (all options: {every})"


def _explain(options: type[FrozenOptions], error: ErrorDetails, value: Any) -> Iterable[str]:
    """The problems, as text, of one of pydantic's errors."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, StrategyError):
        return map(str, cause.problems)
    texts: tuple[str, ...] = cause.args if isinstance(cause, ValueError) else ()
    if not error["loc"]:
        return texts
    path = ""
    for key in error["loc"]:
        path = f'{path}["{key}"]' if path else str(key)
        field = options.model_fields.get(str(key))
        if field is None:
            return [unknown_option(options, key, path)]
        accepts = _accepts(field)
        value, options = value.get(key), _nested(field) or options
    what = f"is missing; accepts {accepts}" if error["type"] == "missing" else _refusal(value, accepts)
    return [f"{path}: {text}" for text in texts or (what,)]


def problems_with(options: type[FrozenOptions], settings: Mapping[str, object]) -> list[str]:
    """Every problem of `settings`: wrong ones first, then contradictions between the others."""
    try:
        options.model_validate(settings)
    except ValidationError as refused:
        errors = refused.errors(include_url=False)
    else:
        return []
    wrong = {error["loc"][0] for error in errors if error["loc"]}
    others = {key: value for key, value in settings.items() if key not in wrong}
    texts = [text for error in errors for text in _explain(options, error, settings)]
    return texts + (problems_with(options, others) if wrong else [])


def context_error(title: str, problems: Iterable[str]) -> ContextError:
    """The error that lists `problems` under `title`."""
    return ContextError("\n".join([title, *("  - " + text.replace("\n", "\n  ") for text in problems)]))
