"""What this process keeps about its job and about itself: what it opened, what it set, and what scripts asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from ...strategy.mesh import Mesh
    from .security import Wanted


@dataclass
class JobState:
    """The job of a process.

    wanted           the security that a script asks of `init`, if any (security.py)
    bound            the environment variables that were set for it
    in_plain         the backends that this process has used without TLS of their own
    doors            the doors that are open until `shut`, and the passages to doors of others (door.py)
    loop             the event loop of the doors, in a thread of the process `loop_of`; None until it is needed
    pulses           one, if a scheduler has admitted this process (worker.py)
    before_shutdown  what `shutdown` calls first, in order
    local_ranks      the process group that was started here, if any, and the local rank (process.py)
    starts           how often one was started here: the keys of each in a store have its number
    mesh             the mesh that was set in a process without a launcher (ops/where.py)
    lock             of the threads that take a number of `folders`
    folders          by process, since a fork has none of its parent's, and by path: the folder taken for graphs
                     there, and the numbers of its calls (graphs/record.py)
    """

    wanted: Wanted | None = None
    bound: dict[str, str] = field(default_factory=dict)
    in_plain: set[str] = field(default_factory=set)
    doors: list[Any] = field(default_factory=list)
    loop: AbstractEventLoop | None = None
    loop_of: int = 0
    pulses: list[Any] = field(default_factory=list)
    before_shutdown: dict[Callable[[], object], None] = field(default_factory=dict)
    local_ranks: dict[object, int | None] = field(default_factory=dict)
    starts: int = 0
    mesh: Mesh | None = None
    lock: Lock = field(default_factory=Lock)
    folders: dict[tuple[int, Path], tuple[Path, Iterator[int]]] = field(default_factory=dict)


JOB = JobState()
