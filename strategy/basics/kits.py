"""The functions of kits that the core calls, each imported when it is first used.

A kit (kits/) is a package of its own above all stages. The core runs without kits, and calls them only by these names.
"""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Any


class Door(StrEnum):
    """A function of a kit."""

    PLAN_PAGE = "show.pages:plan_page"
    PLAN_CELL = "show.page.document:compact"
    JOIN_SERVERS = "ps.service.settings:join"
    PREDICT_LAYOUT = "checkpoints.per_rank:infer_predict_layout"
    SAVE_PRETRAINED = "checkpoints.pretrained:save_pretrained"
    SAVE_ADAPTER = "integrations.peft:save_pretrained"

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Import the function and call it."""
        module, _, name = self.value.partition(":")
        return getattr(importlib.import_module(f"partway.{module}"), name)(*args, **options)
