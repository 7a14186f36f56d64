"""The fixture `lab` of the tests of planning."""

import pytest


@pytest.fixture
def lab():
    """tests/helpers/lab.py, which is imported for the first test that asks for it: it imports PyTorch."""
    import lab

    return lab
