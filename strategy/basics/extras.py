"""The extras of pyproject.toml: how a person installs what a part of Partway needs."""

from __future__ import annotations


def install_extra(extra: str) -> str:
    """The command that installs an extra, and where to run it, as messages say it."""
    return f"pip install '.[{extra}]' in Partway's checkout"
