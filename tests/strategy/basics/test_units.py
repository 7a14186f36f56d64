import math

import pytest

from partway.strategy.basics.units import human, lasting


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999.4, "999 B"),
        (999.7, "1 kB"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (123_456, "123 kB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (2.5e9, "2.5 GB"),
        (3e12, "3 TB"),
        (1.2345e16, "12300 TB"),
    ],
)
def test_bytes_for_people(size, text):
    assert human(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (1.234e-6, "1.23 us"),
        (9.996e-4, "1 ms"),
        (0.5, "500 ms"),
        (12.0, "12 s"),
        (-3e-3, "-3 ms"),
        (math.inf, "inf s"),
    ],
)
def test_times_for_people(seconds, text):
    assert lasting(seconds) == text
