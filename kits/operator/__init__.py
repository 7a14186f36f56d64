"""The Kubernetes operator: from a yaml of kind PartwayJob to pods that train, with their scheduler and servers.

    spec.py         what a job says, checked; nothing else knows its fields
    crd.py          the CustomResourceDefinition, made from spec.py
    observed.py     what a decision looks at: pods, and the status that the operator has written
    decision.py     the pure function from (job, pods, services, now) to actions and the new status
    pods.py         the objects that a job is made of
    cluster.py      the API of Kubernetes, as far as it is used
    watch.py        watches of the API server
    shell.py        looks at what has changed, and carries decisions out; the process
    lease.py        of several operators, the one that works
    health.py       the answer to probes
    manifests.py    what installs it; yaml of a job

Nothing else of Partway imports it. The extra is partway[k8s].
"""
