"""The `partway` command.

cli.py              the subcommands and their options
jobs.py             `partway run`; plan_command.py: `partway plan`; compare_graphs.py: `partway diff`
named.py, spelling.py
                    functions by name, and values as text, of a command line
"""
