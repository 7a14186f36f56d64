"""The parameter server: gradients go to servers, which hold the parameters and take the optimizer's steps.

In comes a job (which parameters, which optimizer); workers push gradients and pull what changed. Any worker and any
server may be killed, come and go: what was acknowledged is applied once.

    job.py             what is trained, alike for all
    pieces.py          how parameters are divided, and which server has which piece
    update.py          the optimizer's step on pieces, and on tables by rows
    shelf.py           a server's records in LMDB
    server.py          a server
    gate.py            async mode: how stale a push may be
    coordinator.py     who is there: workers, servers, which has what; who waits for whom
    cluster.py         what runs as actors of Ray, and where; the only file that knows Ray
    roles.py           the scheduler, the servers and the workers, by MS_ROLE; settings.py: what was asked for
    client.py          a worker: its step, and what it does when others die
    tables.py          embeddings whose rows are pulled when they are looked up
    wire.py            tensors as arrays
"""
