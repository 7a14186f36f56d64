"""Models of other libraries train on simulated devices as on one; the table is in docs/coverage/models.md."""

from __future__ import annotations

import models
import pytest


@pytest.mark.slow
@pytest.mark.timeout(models.SECONDS + 60)
@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_trains_as_on_one_device_in_every_set_up(name: str) -> None:
    cells = models.run(name)
    if cells[0].status == "skipped":
        pytest.skip(cells[0].reason)
    assert [cell.status for cell in cells] == ["right"] * len(models.setups_of(name)), [*map(str, cells)]
