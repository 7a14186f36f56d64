"""Helpers of all stages, independent of sharding.

choice              enums that are strings
files               atomic writes of files
blocks              blocks that clean up, and what a thread is capturing and planning
suggest             names that a person may have meant
units, extras       sizes and times in readable units, and how to install an extra
kits                the doors through which the core calls kits
"""
