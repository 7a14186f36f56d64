"""Partway's log messages, for tests."""

import logging


class Heard(logging.Handler):
    """Collects Partway's log messages."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("partway").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("partway").removeHandler(self)
