"""The `partway` command.

cli.py              the subcommands and their options
jobs.py             `partway run`; plan_command.py: `partway plan`; compare_graphs.py: `partway diff`
named.py, spelling.py
                    what is named and written on a command line, as functions and values
"""
