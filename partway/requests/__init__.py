"""What a person asks for, checked: the arguments of `shard` and `compile`, DTensors, rules of operators.

request.py          the arguments of one `shard` or `compile`
shardable.py        whether functions, modules and arguments can be split at all
attached.py         the engine that `shard` attaches to a module
dtensors.py         DTensors as annotations
user_rules.py       `partway.rule`
plan_inputs.py      all that a plan follows from
planning_log.py     what is said while a call is planned
"""
