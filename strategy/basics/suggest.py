"""Suggestions in the error for an unknown name: the names that a person may have meant, or all existing ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CLOSE = 0.6  # the least similarity of two names (the ratio of `difflib.SequenceMatcher`)
SHOWN = 6  # names in a list


def nearest(name: str, names: Iterable[str], *, most: int = 3, close: float = CLOSE) -> list[str]:
    """The `names` that resemble `name`, at most `most` of them, the closest first."""
    return get_close_matches(name, list(names), most, close)


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "", *, most: int = 3, close: float = CLOSE) -> str:
    """`did you mean 'tp' or 'dp'?`; `otherwise` where none of `names` resembles `name`."""
    matches = nearest(name, names, most=most, close=close)
    return f"did you mean {either(map(repr, matches))}?" if matches else otherwise


def there_are(kind: str, names: Iterable[str]) -> str:
    """`the modules are 'a', 'b', ...`, or `there are no modules`; `kind` is the plural."""
    listed = [repr(name) for name in names]
    if not listed:
        return f"there are no {kind}"
    return f"the {kind} are {', '.join(listed[:SHOWN])}" + (", ..." if len(listed) > SHOWN else "")


def either(choices: Iterable[object]) -> str:
    """The choices as text: `1`, `1 or 2`, `1, 2 or 3`."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last
