"""What set_ps_context asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from partway.ps.service import settings
from partway.ps.service.settings import ServerSettings
from partway.strategy.errors import RuntimeStateError


@pytest.fixture(autouse=True)
def _none() -> Iterator[None]:
    before = settings.wanted()
    settings.want(None)
    yield
    settings.want(before)


def test_no_parameter_server_is_asked_for_at_first() -> None:
    assert settings.wanted() is None
    with pytest.raises(RuntimeStateError) as error:
        settings.required()
    assert str(error.value) == (
        "there is no parameter server; call set_ps_context(enable_ps=True) and then init() first"
    )


def test_what_was_asked_for_last_holds() -> None:
    settings.want(ServerSettings())
    settings.want(asked := ServerSettings("async", 4, "disk", Path("/shelves"), "bfloat16"))
    assert settings.required() is settings.wanted() is asked
    settings.want(None)
    assert settings.wanted() is None


def test_by_default_a_job_is_synchronous_and_survives_its_processes() -> None:
    assert ServerSettings() == ServerSettings("sync", None, "process", None, None)
