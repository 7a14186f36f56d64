"""The Kubernetes operator: runs a yaml of kind PartwayJob as pods that train, with their scheduler and servers.

    spec.py         the fields of a job, checked; no other file knows them
    crd.py          the CustomResourceDefinition, made from spec.py
    observed.py     the input of a decision: pods, and the status that the operator has written
    decision.py     the pure function from (job, pods, services, now) to actions and the new status
    pods.py         the objects of a job
    cluster.py      the API of Kubernetes, as far as it is used
    watch.py        watches of the API server
    shell.py        the process: examines jobs that have changed, and carries out decisions
    lease.py        elects the operator that works, among several
    health.py       the answer to probes
    manifests.py    yaml that installs it; yaml of a job

No other part of Partway imports it. The extra is partway[k8s].
"""
