"""Docstrings as Markdown: they are written to be read in a terminal, and the site shows the same text.

Two spaces after a name begin what is said of it, over lines that are indented as far: a list in the site. An indented
block is code.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import griffe

_NAMED = re.compile(r"(?P<name>\S(?: ?\S)*)(?P<gap> {2,})(?P<text>\S.*)")

_SIGN = re.compile(r"(?<!\*)\*(?!\*)|[_<\[]")  # that Markdown would take for its own; ** is meant so


class Readable(griffe.Extension):
    """Rewrites every docstring that is read for the site."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown_of(obj.docstring.value)


def markdown_of(text: str) -> str:
    """The Markdown of a docstring."""
    return "\n\n".join(_block(block) for block in _blocks(text))


def _blocks(text: str) -> Iterator[list[str]]:
    """What lies between empty lines; code with empty lines in it is one."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def _block(lines: list[str]) -> str:
    if all(line.startswith("    ") for line in lines):
        return "\n".join(["```python", *textwrap.dedent("\n".join(lines)).splitlines(), "```"])
    written: list[str] = []
    column = 0
    for line in lines:
        named = _NAMED.fullmatch(line)
        if named and not line.startswith(" "):
            column = named.start("text")
            written += ["", f"* **{_name(named['name'])}**: {_plain(named['text'])}"]
        elif column and line.startswith(" " * min(column, 2)):
            written.append(f"  {_plain(line.strip())}")
        else:
            column = 0
            written.append(_plain(line))
    return "\n".join(written).strip("\n")


def _name(name: str) -> str:
    return name if "`" in name else f"`{name}`"


def _plain(line: str) -> str:
    """A line whose signs are no Markdown outside of its code and bold words."""
    parts = line.split("`")
    return "`".join(_SIGN.sub(r"\\\g<0>", part) if i % 2 == 0 else part for i, part in enumerate(parts))
