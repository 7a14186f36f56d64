"""What `set_ps_context` takes, and its errors; what `init` makes of it: tests/runtime/launching/test_security.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from certificates import Authority

import partway as pw
from partway.runtime.launching import security

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
    ({"enable_ssl": 1}, "set_ps_context: enable_ssl is 1; it must be a bool"),
    ({"enable_ssl": True, "secure_interface": 3}, "secure_interface must be a str, and 3 is none"),
    ({"secure_interface": "wg0"}, "secure_interface means nothing without enable_ssl=True"),
    ({"config_file_path": "x"}, "config_file_path means nothing without enable_ssl=True"),
    ({"enable_ssl": True, "client_password": "hush"}, "a password means nothing without server_cert_path, client_cert"),
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


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """What a configuration names."""
    authority = Authority(tmp_path)
    for side in ("server", "client"):
        authority.sign(side, kind="p12", password="hush hush")
    return {"server_cert_path": "server.p12", "client_cert_path": "client.p12", "ca_cert_path": authority.file.name}


@pytest.mark.parametrize("how", ["arguments", "environment", "file"])
def test_certificates_are_read_with_their_password(
    config: Config, files: dict[str, str], how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"client_password": "hush hush", "server_password": "hush hush"} if how == "arguments" else {}
    if how == "environment":
        monkeypatch.setenv("PARTWAY_SSL_PASSWORD", "hush hush")
    if how == "file":
        (tmp_path / "password").touch(mode=0o600)
        (tmp_path / "password").write_text("hush hush\n", encoding="utf-8")
        files["password_path"] = "password"
    pw.set_ps_context(enable_ssl=True, config_file_path=config(json.dumps(files)), **given)
    wanted = security.wanted()
    assert wanted is not None
    assert wanted.contexts is not None
    assert security.guard() is not None


def test_certificates_that_do_not_serve_are_errors(config: Config, files: dict[str, str], tmp_path: Path) -> None:
    def refused(**changed: str) -> str:
        with pytest.raises((pw.ContextError, pw.RuntimeStateError)) as error:
            pw.set_ps_context(
                enable_ssl=True, config_file_path=config(json.dumps(files | changed)), client_password="hush hush",
                server_password="wrong" if "wrong" in changed.values() else "hush hush",
            )  # fmt: skip
        assert "hush" not in str(error.value)
        return str(error.value)

    (tmp_path / "wrong").write_text("x", encoding="utf-8")
    (tmp_path / "wrong").chmod(0o644)
    assert "the password of server_cert_path" in refused(cipher_list="wrong")
    assert "password_path names" in (said := refused(password_path="wrong"))
    assert "which other users may read or write; run: chmod 600" in said
    assert "password_path names" in (said := refused(password_path="gone"))
    assert "which cannot be read: No such file" in said
    assert "the file of config_file_path lacks ca_cert_path" in refused(ca_cert_path="")
    only = config(json.dumps({"cipher_list": "ECDHE"}))
    with pytest.raises(pw.ContextError, match="cipher_list means nothing without server_cert_path, client_cert_path"):
        pw.set_ps_context(enable_ssl=True, config_file_path=only)
