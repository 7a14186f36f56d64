"""A pool of ranks: processes that wait for functions to run, so that all tests of a session start them once.

Each of them runs `rank.py`.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist
from rank import serve
from scripts import FORKS

SECONDS = 100  # of a call in which its ranks are nearly idle, since they wait for each other
THREADS = 120  # of a rank: with more its pool is worn, since the threads of each process group poll
BUSY = 0.05  # of that time on a CPU: a rank with more is not waiting


def seconds_of(process):
    """The CPU seconds of a process; 0 if the system does not report them."""
    try:
        user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Pool:
    """`n` processes with one rank each. The rendezvous is a store in this process, so two pools cannot meet."""

    def __init__(self, n):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # two ranks have different hash seeds, as under a launcher; all others start as forks, which is fast
        spawned = {1} if n == 2 else set()
        self.logs, self.processes, self.connections = [], [], []
        for rank in range(n):
            ours, theirs = Pipe()
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(n),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not listen itself
                "OMP_NUM_THREADS": "1",
            }
            if os.environ.get("PARTWAY_TEST_DEVICE") == "cuda":
                environment |= {"LOCAL_RANK": str(rank), "PARTWAY_SHARE_GPU": "1"}
            log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - open as long as the process
            with theirs:
                start = multiprocessing.get_context("spawn") if rank in spawned else FORKS
                process = start.Process(target=serve, args=(theirs, {**os.environ, **environment}, log.name))
                process.start()
            self.processes.append(process)
            self.logs.append(log)
            self.connections.append(ours)

    def call(self, function, arguments):
        """The result of `function(*arguments)` on each rank. Raises AssertionError with the ranks' output."""
        asked = pickle.dumps((function.__code__.co_filename, function.__name__, arguments))
        end, used = time.monotonic() + SECONDS, self._used()
        errors, results = {}, {}
        for rank, connection in enumerate(self.connections):
            try:
                connection.send_bytes(asked)
            except OSError:
                errors[rank] = "ended"
        waiting = {connection: rank for rank, connection in enumerate(self.connections) if rank not in errors}
        while waiting:
            if time.monotonic() >= end:
                before, used = used, self._used()
                if errors or used - before < BUSY * SECONDS:
                    break
                end += SECONDS
            for connection in wait(list(waiting), max(0, end - time.monotonic())):
                rank = waiting.pop(connection)
                try:
                    error, results[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    error = "ended"
                if error:
                    errors[rank] = error
                    end = min(end, time.monotonic() + 5)  # the others may wait for it in a collective
        errors |= dict.fromkeys(waiting.values(), "did not answer")
        if errors:
            said = {rank: self._said(rank) for rank in errors}
            raise AssertionError(
                "\n".join(f"rank {rank}: {error}\n{said[rank]}" for rank, error in sorted(errors.items()))
            )
        return [results[rank] for rank in range(len(self.connections))]

    def _used(self):
        """The CPU seconds of the ranks; 0 if the system does not report them."""
        return sum(map(seconds_of, self.processes))

    def _said(self, rank):
        self.logs[rank].seek(0)
        return self.logs[rank].read()[-2000:]

    def is_worn(self):
        """Whether new ranks would cost less than the idle process groups of these."""
        try:
            return len(os.listdir(f"/proc/{self.processes[0].pid}/task")) > THREADS
        except OSError:
            return False

    def close(self):
        for connection in self.connections:
            connection.close()
        end = time.monotonic() + 1  # their exit handlers do not matter
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        for log in self.logs:
            log.close()
