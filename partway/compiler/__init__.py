"""The compiler's driver: from a call to a plan, and to the programs that ranks run.

driver.py                   what happens to a call, in one function
passes.py                   the passes between two values of it
meshes.py                   the meshes that a plan may be made on
pick_by_step_time.py        of several plans, the one whose step ends first
replan_within_memory.py     a plan whose program holds no more than the limit
suggest_what_fits.py        what would do where no plan fits
captures.py                 captured calls on disk
planning_lock.py            one thread plans at a time
graphs_asked.py, graphs_record.py   PARTWAY_SAVE_GRAPHS: what each pass made, in files
"""
