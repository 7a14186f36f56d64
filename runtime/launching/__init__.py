"""The launcher of this process, how the processes of a job find each other, and which may join.

The input is the variables that a launcher sets, and the protection that a script asks for. The output is a `Launch`
(this process's rank, and the meeting place), a `Guard` and a `Way` (who is let in, and on which interface), and for a
worker of the scheduler its store and its rank. Nothing here imports `process.py`, which makes the process group from
these.

    launchers.py        finds the launcher by the environment: one table of launchers
    scheduler.py        the scheduler of a job; worker.py: a worker's side
    door.py             the door before the store, which asks for the job's secret or a certificate
    certificates.py     certificates: reads and checks them, and makes TLS contexts
    job.py              what this process keeps about its job: the one place of such state
    security.py         the way on which nothing leaves the host in plain; interfaces.py: this host's interfaces
"""
