"""Architectures of Hugging Face train on 8 simulated devices as they do on one; the table is in docs/coverage."""

from __future__ import annotations

import pytest
from architectures import ARCHITECTURES, SECONDS, SETUPS, check_all, in_a_process

QUICK = ("unet",)


@pytest.mark.parametrize("name", QUICK)
def test_a_small_architecture_trains_as_on_one_device(name: str) -> None:
    (cell,) = check_all(name, ("2 x 4",))
    assert cell.status == "right", str(cell)
    assert cell.collectives


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_as_on_one_device_in_every_set_up_or_is_refused(name: str) -> None:
    if package := ARCHITECTURES[name].needs:
        pytest.importorskip(package)
    cells, refused = in_a_process(name), ARCHITECTURES[name].refused
    assert [cell.status for cell in cells] == ["refused" if refused else "right"] * len(SETUPS), [*map(str, cells)]
    assert all(refused in cell.reason for cell in cells)
