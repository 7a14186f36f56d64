"""One rank of a pool (see pool.py): a process that runs the functions that tests send, until the connection closes.

Its output goes to stderr, which the pool shows if something fails.
"""

import functools
import gc
import importlib.util
import os
import pickle
import sys
import traceback
import warnings

import torch
from afresh import start_afresh

import partway.sharding  # noqa: F401 - what nearly each test needs
from partway.runtime import init, shutdown


@functools.cache
def module_of(path):
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def serve(connection, environment, log):
    """Run the functions that `connection` receives, as a rank that a launcher started with `environment`; output goes
    to `log`."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    init(backend="nccl" if os.environ.get("PARTWAY_TEST_DEVICE") == "cuda" else "gloo")
    gc.freeze()
    while True:
        try:
            path, name, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # of autograd's threads
                start_afresh()
                answer = None, getattr(module_of(path), name)(*arguments)
        except Exception:
            answer = traceback.format_exc(), None
        connection.send_bytes(pickle.dumps(answer))
    shutdown()
