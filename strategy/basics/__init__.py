"""What all stages need, and nothing of sharding.

choice              enums that are strings
files, afterwards   files that are whole or not there, blocks that clean up
suggest             names that a person may have meant
units, extras       sizes and times as people read them, and how to install an extra
kits                the doors by which the core asks a kit for something
under_way           what a thread is capturing and planning
"""
