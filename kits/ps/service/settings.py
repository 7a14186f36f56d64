"""The options of `set_ps_context`: one value for the process, which `init` reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from partway.strategy import RuntimeStateError


@dataclass(frozen=True)
class ServerSettings:
    """The options of the parameter server.

    mode            "sync" or "async"
    max_staleness   of a push in async mode; None: any
    durability      what the servers' parameters survive: see shelf.py
    shard_folder    the folder of the parameters; None: one that ends with the job
    gradient_dtype  the dtype in which gradients are sent; None: their own
    """

    mode: str = "sync"
    max_staleness: int | None = None
    durability: str = "process"
    shard_folder: Path | None = None
    gradient_dtype: str | None = None


_now: list[ServerSettings | None] = [None]


def want(settings: ServerSettings | None) -> None:
    """Use the parameter server from `init` on; None: do not."""
    _now[0] = settings


def wanted() -> ServerSettings | None:
    """The options; None if no parameter server is asked for."""
    return _now[0]


def required() -> ServerSettings:
    """The options. Raises RuntimeStateError if no parameter server is asked for."""
    if (settings := _now[0]) is None:
        raise RuntimeStateError(
            "there is no parameter server; call set_ps_context(enable_ps=True) and then init() first"
        )
    return settings


def join() -> None:
    """Join a parameter server's cluster, if set_ps_context asked for one; in a worker that is a group of ranks, rank 0
    does. The scheduler and the servers end here."""
    if wanted() is None:
        if os.environ.get("MS_SERVER_NUM", "0") != "0":
            raise RuntimeStateError(
                f"MS_SERVER_NUM={os.environ['MS_SERVER_NUM']} asks for a parameter server; call "
                "set_ps_context(enable_ps=True) before init(), or unset it"
            )
    elif os.environ.get("RANK", "0") == "0":
        from partway.ps.service import roles

        roles.join()
