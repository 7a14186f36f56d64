"""Operators that call Python: functions.py (captured control flow), hooked.py (hooks), manual.py (manual functions)."""
