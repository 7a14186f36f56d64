"""Random numbers of Python and NumPy are refused in a captured function."""

import random
import threading

import numpy as np
import pytest
import torch

from partway.propagation.capture.capture import capture
from partway.strategy import CaptureError


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_python_s_random_numbers_are_refused(draw):
    def drops(x):
        return x * 2 if draw() < 0.5 else x

    with pytest.raises(CaptureError, match=r"random numbers of Python's module (numpy.)?random are drawn in .*drops"):
        capture(drops, (torch.ones(2),), {})


def test_threads_that_draw_nothing_do_not_turn_the_refusal_into_a_warning():
    idle = threading.Event()
    ours = threading.Thread(target=idle.wait, name="partway watch")
    ours.start()
    with pytest.raises(CaptureError, match="random numbers of Python's module random are drawn"):
        capture(lambda x: x * random.random(), (torch.ones(2),), {})
    idle.set()
    ours.join()


def test_python_s_random_numbers_of_another_thread_are_warned_of():
    idle = threading.Event()
    other = threading.Thread(target=idle.wait)
    other.start()
    with pytest.warns(
        UserWarning, match="if not by another thread, random numbers of Python's module random are drawn"
    ):
        capture(lambda x: x * random.random(), (torch.ones(2),), {})
    idle.set()
    other.join()
