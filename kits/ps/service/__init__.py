"""The parameter server: gradients go to servers, which hold the parameters and take the optimizer's steps.

The input is a job (which parameters, which optimizer); workers push gradients and pull changed parameters. Any worker
and any server may be killed, come and go: acknowledged pushes are applied exactly once.

    job.py             the job, the same for all
    pieces.py          divides parameters into pieces, and assigns these to servers
    update.py          the optimizer's step on pieces, and on tables by rows
    shelf.py           a server's records in LMDB
    server.py          a server
    gate.py            async mode: bounds the staleness of pushes
    coordinator.py     tracks workers and servers, assigns pieces, and decides who waits for whom
    cluster.py         actors of Ray, and their places; the only file that knows Ray
    roles.py           the scheduler, the servers and the workers, by MS_ROLE; settings.py: the options
    client.py          a worker: its steps, and its reaction when others die
    tables.py          embeddings whose rows are pulled when they are looked up
    wire.py            tensors as arrays
"""
