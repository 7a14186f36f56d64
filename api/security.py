"""`set_ps_context`: nothing that the ranks send leaves a host in plain, or `init` is an error."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError

from partway.runtime import security
from partway.strategy import ContextError, RuntimeStateError
from partway.strategy.errors import shown


class _Config(BaseModel):
    """The file of `config_file_path`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    secure_interfaces: list[str] = []


def set_ps_context(
    *, enable_ssl: bool = False, config_file_path: str = "", secure_interface: str | None = None
) -> None:
    """Ask that no byte of what the ranks send leaves a host in plain. Before `init`, on every rank.

    enable_ssl          whether that is asked; where it cannot be had, `init` raises RuntimeStateError and sends nothing
    config_file_path    a JSON file: "secure_interfaces" lists those that encrypt without being WireGuard's
    secure_interface    the interface that all ranks use; without it they have to be on one host

    Raises ContextError for wrong arguments, and for a file that cannot be read, that others may write, or that has keys
    that are not known; RuntimeStateError where the processes have joined already.
    """
    for name, value, of in (
        ("enable_ssl", enable_ssl, bool),
        ("config_file_path", config_file_path, str),
        ("secure_interface", secure_interface, str | None),
    ):
        if not isinstance(value, of):
            raise ContextError(f"set_ps_context: {name} is {shown(value)}; it must be {getattr(of, '__name__', of)}")
    if not enable_ssl and (config_file_path or secure_interface):
        raise ContextError("set_ps_context: config_file_path and secure_interface mean nothing without enable_ssl=True")
    if dist.is_initialized():
        raise RuntimeStateError("set_ps_context comes before init(), and the processes have joined already")
    config = _read(config_file_path) if config_file_path else _Config()
    security.want(security.Wanted(secure_interface, tuple(config.secure_interfaces)) if enable_ssl else None)


def _read(name: str) -> _Config:
    path, told = Path(name), f"set_ps_context: config_file_path is {shown(name)}"
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ContextError(f"{told}, which cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if mode & 0o022:
        raise ContextError(f"{told}, which other users may write; run: chmod go-w {name}")
    try:
        return _Config.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise ContextError(f"{told}, which is not JSON: {error}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ContextError(f"{told}, and in it {wrong}; known are {', '.join(_Config.model_fields)}") from None
