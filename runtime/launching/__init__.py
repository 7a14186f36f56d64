"""What started the processes of a job, how they find each other, and who may join them.

In come the variables that a launcher sets, and what a script wants protected. Out go a `Launch` (this process's rank,
and where all meet), a `Guard` and a `Way` (who is let in, and on which interface), and for a worker of the scheduler
its store and its rank. Nothing here imports `process.py`, which makes the process group from these.

    launchers.py        what started this process, by its environment: one table of launchers
    scheduler.py        the scheduler of a job; worker.py: a worker's side
    door.py             the door before the store, which asks for the job's secret or a certificate
    certificates.py     certificates, read, checked, and made into TLS contexts
    job.py              what this process has of its job: the one place of such state
    security.py         the way on which nothing leaves the host in plain; interfaces.py: this host's interfaces
"""
