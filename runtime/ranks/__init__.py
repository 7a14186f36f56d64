"""What ranks know of each other: what has to be alike is compared, and who waits in vain is told.

watch.py            the thread that asks and answers; doing.py, answering.py; over NCCL flights.py
agreement.py        what is compared before a plan is followed
ledger.py           what is compared while steps run; replicas.py: of parameters and states
stragglers.py       who is waited for; device_memory.py: what the device of each rank has
world.py            what is kept as long as a process group lasts
"""
