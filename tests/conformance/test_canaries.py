"""Each canary of canaries.py is where it says, and so is the test that catches it, which `make test` runs."""

import canaries
import mutations
import pytest
import tiers
from test_mutations import functions
