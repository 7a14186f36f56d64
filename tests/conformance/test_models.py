"""Models of other libraries train on simulated devices as on one; the table is in docs/coverage/models.md."""

from __future__ import annotations

import models
import pytest


@pytest.mark.slow
@pytest.mark.timeout(models.SECONDS + 60)
@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_trains_as_on_one_device_in_every_set_up_or_is_refused(name: str) -> None:
    cells, refused = models.run(name), models.MODELS[name].refused
    if cells[0].status == "skipped":
        pytest.skip(cells[0].reason)
    expected = "refused" if refused else "right"
    assert [cell.status for cell in cells] == [expected] * len(models.setups_of(name)), [*map(str, cells)]
    assert all(refused in cell.reason for cell in cells)
