"""Tables in which operators look up a key among their arguments, so that a graph is a plain list of calls on disk.

FUNCTIONS   by a digest of their text: functions that capture wrote for control flow (python/functions.py)
MANUALS     by a digest of their contents: manual functions that were traced in this process (python/manual.py)
WRITTEN     by the key of a manual function, and whether it is verified: its form on a rank (manual/writing.py)
HOOK_OF     by number: users' hooks, each as long as its graph lives (python/hooked.py)
LISTENERS   by number: functions that hear how many rows each expert gets (experts.py)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

FUNCTIONS: dict[str, Any] = {}
MANUALS: dict[str, Any] = {}
WRITTEN: dict[tuple[str, bool], Any] = {}
HOOK_OF: WeakValueDictionary[int, Any] = WeakValueDictionary()
LISTENERS: dict[int, Callable[[str, int, Tensor], None]] = {}
NUMBERS = itertools.count()
