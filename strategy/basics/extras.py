"""The extras of pyproject.toml: how to install the dependencies of a part of Partway."""

from __future__ import annotations


def install_extra(extra: str) -> str:
    """The command that installs an extra, and where to run it, as text for a message."""
    return f"pip install '.[{extra}]' in Partway's checkout"
