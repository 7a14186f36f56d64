"""The base class of all options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class FrozenOptions(BaseModel):
    """Frozen options; `absent` maps options of MindSpore that do not exist here to what to do instead."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    absent: ClassVar[Mapping[str, str]] = {}

    def describe(self) -> str:
        """A table with one row per option: its name, whether it was set or is the default, and its value."""
        values = self.model_dump()
        width = max(map(len, values))
        return "\n".join(
            f"{key:{width}}  {'set' if key in self.model_fields_set else 'default':7}  {value!r}"
            for key, value in values.items()
        )

    def __str__(self) -> str:
        return self.describe()
