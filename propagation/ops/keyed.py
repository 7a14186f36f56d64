"""What operators find by a key among their arguments: a graph is a plain list of calls, which can be kept on disk.

FUNCTIONS   by a digest of their text: what capture wrote for control flow, which programs may run (python/functions.py)
MANUALS     by a digest of all that each is: the manual functions that were traced in this process (python/manual.py)
WRITTEN     by the key of a manual function, and whether it is verified: as a rank runs it (manual/writing.py)
HOOK_OF     by number: users' hooks, each as long as the graph that it is of (python/hooked.py)
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

FUNCTIONS: dict[str, Any] = {}
MANUALS: dict[str, Any] = {}
WRITTEN: dict[tuple[str, bool], Any] = {}
HOOK_OF: WeakValueDictionary[int, Any] = WeakValueDictionary()
NUMBERS = itertools.count()
