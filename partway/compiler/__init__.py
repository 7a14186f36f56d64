"""The compiler's driver: from a call to a plan, and to the programs that ranks run.

driver.py                   what happens to a call, in one function
passes.py                   the passes between two values of it
plan_inputs.py, meshes.py   what a plan follows from, and the meshes that it may be made on
pick_by_step_time.py        of several plans, the one whose step ends first
replan_within_memory.py     a plan whose program holds no more than the limit
suggest_what_fits.py        what would do where no plan fits
cache.py                    plans and programs on disk
planning_lock.py, planning_log.py   one thread plans at a time; what is said meanwhile
"""
