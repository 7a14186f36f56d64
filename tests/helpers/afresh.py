"""The state in which each test starts, here and on a rank."""

import os
import sys


def start_afresh():
    """Reset options, seed and device to those of a new process: the previous test may have left them in any state.
    Nothing is imported for this."""
    if torch := sys.modules.get("torch"):
        torch.set_default_device(os.environ.get("PARTWAY_TEST_DEVICE"))
        # that of the module formats a stack for each kind of device that was not used yet
        (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
    if context := sys.modules.get("partway.options.context"):
        context.reset_auto_parallel_context()
        context.reset_algo_parameters()
