"""What `set_ps_context` takes, and its errors; what `init` makes of it is in tests/runtime/test_security.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import partway as pw
from partway.runtime import security

Config = Callable[..., str]


@pytest.fixture(autouse=True)
def nothing_wanted() -> Iterator[None]:
    yield
    pw.set_ps_context()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """`config(text, mode)`: the path of such a file."""

    def write(text: str, mode: int = 0o600) -> str:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        (tmp_path / "config.json").chmod(mode)
        return str(tmp_path / "config.json")

    return write


def test_it_asks_for_what_init_finds(config: Config) -> None:
    pw.set_ps_context(enable_ssl=True)
    assert security.wanted() == security.Wanted()
    path = config(json.dumps({"secure_interfaces": ["wg0", "ipsec0"]}))
    pw.set_ps_context(enable_ssl=True, config_file_path=path, secure_interface="wg0")
    assert security.wanted() == security.Wanted("wg0", ("wg0", "ipsec0"))
    pw.set_ps_context()
    assert security.wanted() is None


def test_a_simulation_sends_nothing_and_goes_on() -> None:
    pw.set_ps_context(enable_ssl=True)
    assert pw.init(simulate=4) == 4


@pytest.mark.parametrize(("given", "said"), [
    ({"enable_ssl": 1}, "set_ps_context: enable_ssl is 1; it must be bool"),
    ({"enable_ssl": True, "secure_interface": 3}, r"secure_interface is 3; it must be str \| None"),
    ({"secure_interface": "wg0"}, "config_file_path and secure_interface mean nothing without enable_ssl=True"),
    ({"config_file_path": "x"}, "config_file_path and secure_interface mean nothing without enable_ssl=True"),
    ({"enable_ssl": True, "config_file_path": "/nowhere"}, "'/nowhere', which cannot be read: No such file"),
])  # fmt: skip
def test_wrong_arguments_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(pw.ContextError, match=said):
        pw.set_ps_context(**given)
    assert security.wanted() is None


@pytest.mark.parametrize(("text", "mode", "said"), [
    ("{}", 0o620, "which other users may write; run: chmod go-w"),
    ("{", 0o600, "which is not JSON: Expecting"),
    ('{"secure_interface": ["wg0"]}', 0o600, "and in it secure_interface: Extra inputs are not permitted; known are"),
    ('{"secure_interfaces": "wg0"}', 0o600, "and in it secure_interfaces: Input should be a valid list"),
])  # fmt: skip
def test_wrong_files_are_named(config: Config, text: str, mode: int, said: str) -> None:
    with pytest.raises(pw.ContextError, match=said):
        pw.set_ps_context(enable_ssl=True, config_file_path=config(text, mode))


def test_it_comes_before_init() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(pw.RuntimeStateError, match=r"comes before init\(\), and the processes have joined already"):
            pw.set_ps_context(enable_ssl=True)
    finally:
        dist.destroy_process_group()
