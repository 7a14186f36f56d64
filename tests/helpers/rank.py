"""One rank of a pool (see pool.py): a script that runs what the tests send it until the connection closes.

It prints what it has to say on stderr, which the pool shows when something fails.
"""

import functools
import importlib.util
import os
import pickle
import sys
import traceback
import warnings
from multiprocessing.connection import Connection

import torch

import partway as pw
from partway.runtime import init, shutdown


@functools.cache
def module_of(path):
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def start_afresh():
    """The options and the seed that a new process has: the test before may have left them in any state."""
    torch.manual_seed(0)
    pw.reset_auto_parallel_context()
    pw.reset_algo_parameters()


def serve(connection):
    while True:
        try:
            path, name, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                start_afresh()
                answer = None, getattr(module_of(path), name)(*arguments)
        except Exception:
            answer = traceback.format_exc(), None
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    torch.set_num_threads(1)
    init(backend="gloo")
    serve(Connection(int(sys.argv[1])))
    shutdown()
