"""The launcher of this process, how the processes of a job find each other, and which may join.

The input is the variables that a launcher sets, and the protection that a script asks for. The output is a `Launch`
(this process's rank, and the meeting place), a `Guard` and a `Way` (who is let in, and on which interface), and for a
worker of the scheduler its store and its rank. No other module here imports `process.py`, which makes the process
group from these.

    launchers.py        finds the launcher by the environment: one table of launchers
    scheduler.py        the scheduler of a job; worker.py: a worker's side
    door.py             the door before the store, which asks for the job's secret or a certificate
    certificates.py     certificates: reads and checks them, and makes TLS contexts
    job.py              what this process keeps about its job: the one place of such state
    security.py         the way on which nothing leaves the host in plain; interfaces.py: this host's interfaces
"""

from __future__ import annotations

from . import gpus, interfaces, security
from .certificates import Certificates, Identity, contexts_of, pem_of
from .door import secret
from .launchers import SCHEDULER, Launch, host_name, is_local, number, simulated, tell_ready
from .process import before_shutdown, meet, meet_by_scheduler
from .scheduler import AGAIN, seconds_of, versions
from .worker import leave

__all__ = [
    "AGAIN",
    "SCHEDULER",
    "Certificates",
    "Identity",
    "Launch",
    "before_shutdown",
    "contexts_of",
    "gpus",
    "host_name",
    "interfaces",
    "is_local",
    "leave",
    "meet",
    "meet_by_scheduler",
    "number",
    "pem_of",
    "seconds_of",
    "secret",
    "security",
    "simulated",
    "tell_ready",
    "versions",
]
