"""`set_ps_context`: asks for a parameter server, or that no data leaves a host in plain; `init` provides it or
fails."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from partway.ps.service import settings
from partway.ps.service.job import MODES
from partway.ps.service.shelf import DURABILITIES
from partway.runtime.launching import Certificates, Identity, contexts_of, security
from partway.strategy import ContextError, RuntimeStateError, shown
from partway.strategy.basics import json_of, reason


class _Config(BaseModel):
    """The content of the file `config_file_path`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    secure_interfaces: list[str] = []
    server_cert_path: str = ""
    client_cert_path: str = ""
    ca_cert_path: str = ""
    crl_path: str = ""
    cipher_list: str = ""
    cert_expire_warning_time_in_day: int = Field(default=90, ge=0, le=36_500)
    password_path: str = ""


def set_ps_context(
    *,
    enable_ps: bool = False,
    mode: str = "sync",
    max_staleness: int | None = None,
    durability: str = "process",
    shard_folder: str | os.PathLike[str] | None = None,
    gradient_dtype: str | None = None,
    enable_ssl: bool = False,
    config_file_path: str = "",
    secure_interface: str | None = None,
    client_password: str = "",
    server_password: str = "",
) -> None:
    """Ask for a parameter server, or that no byte leaves a host in plain. Call it before `init`, everywhere.

    enable_ps           gradients go to servers, which hold the parameters (docs/parameter_server.md)
    mode                "sync": a step waits for every worker's gradients, and applies their mean; "async": each
                        worker's are applied as they come
    max_staleness       async: how many steps of others may be applied between a worker's read of the parameters
                        and its own step; None: any
    durability          what the servers' parameters survive: "process" the death of processes, "disk" that of the
                        machine, "memory" nothing
    shard_folder        the folder of the parameters, for a job that continues later or on another host; None: they are
                        not kept after the job
    gradient_dtype      "bfloat16" or "float16": the dtype in which gradients are sent; None: their own
    enable_ssl          True: no byte leaves a host in plain; if that is impossible, `init` raises RuntimeStateError and
                        sends nothing
    config_file_path    a JSON file: "secure_interfaces" lists those that encrypt without being WireGuard's, and
                        "server_cert_path", "client_cert_path" and "ca_cert_path" name certificates (docs/security.md)
    secure_interface    the interface that all ranks use; without it they have to be on one host
    client_password, server_password    of the files of certificates; "": that of PARTWAY_SSL_PASSWORD, or of the file
                        "password_path"

    Raises ContextError for wrong arguments, and for a file that is unreadable, writable by others, or has unknown keys;
    RuntimeStateError for unsuitable certificates, and after the processes have joined.
    """
    given = {
        "config_file_path": config_file_path,
        "secure_interface": secure_interface,
        "client_password": client_password,
        "server_password": server_password,
    }
    for name, value in given.items():
        if not (isinstance(value, str) or (name == "secure_interface" and value is None)):
            told = "what was given" if "password" in name else shown(value)
            raise ContextError(f"set_ps_context: {name} must be a str, and {told} is none")
    if not isinstance(enable_ssl, bool):
        raise ContextError(f"set_ps_context: enable_ssl is {shown(enable_ssl)}; it must be a bool")
    if useless := [name for name, value in given.items() if value and not enable_ssl]:
        raise ContextError(f"set_ps_context: {useless[0]} means nothing without enable_ssl=True")
    if dist.is_initialized():
        raise RuntimeStateError("set_ps_context comes before init(), and the processes have joined already")
    config = _read(config_file_path) if config_file_path else _Config()
    named = _certificates(config, Path(config_file_path).parent, client_password, server_password)
    contexts = contexts_of(named) if named is not None else None
    declared = tuple(config.secure_interfaces)
    settings.want(_served(enable_ps, mode, max_staleness, durability, shard_folder, gradient_dtype))
    security.want(security.Wanted(secure_interface, declared, contexts, named) if enable_ssl else None)


def _served(
    enable: bool, mode: str, max_staleness: int | None, durability: str, folder: Any, gradient_dtype: str | None
) -> settings.ServerSettings | None:
    """The options of the parameter server, checked."""
    own = settings.ServerSettings()
    if not isinstance(enable, bool):
        raise ContextError(f"set_ps_context: enable_ps is {shown(enable)}; it must be a bool")
    choices = {
        "mode": (mode, MODES),
        "durability": (durability, DURABILITIES),
        "gradient_dtype": (gradient_dtype, (None, "bfloat16", "float16")),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            raise ContextError(f"set_ps_context: {name} is {shown(value)}; it must be {' or '.join(map(repr, known))}")
    bound = max_staleness
    if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
        raise ContextError(f"set_ps_context: max_staleness is {shown(bound)}; it must be an int of 0 or more, or None")
    if bound is not None and mode == "sync":
        raise ContextError('set_ps_context: max_staleness means nothing with mode="sync", where nothing is stale')
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise ContextError(f"set_ps_context: shard_folder is {shown(folder)}; it must be the path of a folder")
    if folder is not None and durability == "memory":
        raise ContextError('set_ps_context: shard_folder means nothing with durability="memory"')
    made = settings.ServerSettings(
        mode, bound, durability, Path(folder) if folder is not None else None, gradient_dtype
    )
    if not enable and made != own:
        names = ("mode", "max_staleness", "durability", "shard_folder", "gradient_dtype")
        name = next(name for name in names if getattr(made, name) != getattr(own, name))
        raise ContextError(f"set_ps_context: {name} means nothing without enable_ps=True")
    return made if enable else None


def _certificates(config: _Config, folder: Path, client: str, server: str) -> Certificates | None:
    """The certificates that the file names; paths are relative to its folder."""
    needed = ("server_cert_path", "client_cert_path", "ca_cert_path")
    missing = [name for name in needed if not getattr(config, name)]
    if len(missing) == len(needed):
        of_them = ("crl_path", "cipher_list", "cert_expire_warning_time_in_day", "password_path")
        useless = [name for name in of_them if name in config.model_fields_set]
        if useless or client or server:
            what = [*useless, "a password"][0]
            raise ContextError(f"set_ps_context: {what} means nothing without {', '.join(needed)} in the file")
        return None
    if missing:
        raise ContextError(f"set_ps_context: the file of config_file_path lacks {', '.join(missing)}")
    common = os.environ.get("PARTWAY_SSL_PASSWORD", "")
    if config.password_path:
        common = _password_in(folder / config.password_path)
    return Certificates(
        Identity("server_cert_path", folder / config.server_cert_path, server or common),
        Identity("client_cert_path", folder / config.client_cert_path, client or common),
        folder / config.ca_cert_path,
        folder / config.crl_path if config.crl_path else None,
        config.cipher_list,
        timedelta(days=config.cert_expire_warning_time_in_day),
    )


def _password_in(path: Path) -> str:
    told = f"set_ps_context: password_path names {path}"
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ContextError(f"{told}, which is not text") from None
    except (OSError, ValueError) as error:  # a name with NUL
        raise ContextError(f"{told}, which cannot be read: {reason(error)}") from None
    if mode & 0o077:
        raise ContextError(f"{told}, which other users may read or write; run: chmod 600 {path}")
    return text.rstrip("\r\n")


def _read(name: str) -> _Config:
    path, told = Path(name), f"set_ps_context: config_file_path is {shown(name)}"
    try:
        mode, text = path.stat().st_mode, path.read_bytes()
    except (OSError, ValueError) as error:  # a name with NUL
        raise ContextError(f"{told}, which cannot be read: {reason(error)}") from None
    if mode & 0o022:
        raise ContextError(f"{told}, which other users may write; run: chmod go-w {name}")
    try:
        return _Config.model_validate(json_of(text))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ContextError(f"{told}, and in it {wrong}; known are {', '.join(_Config.model_fields)}") from None
    except ValueError as error:
        raise ContextError(f"{told}, which {error}") from None
