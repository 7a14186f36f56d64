"""A plugin of pytest that writes how each test went as soon as it has ended: a run may be ended before it can tell."""

import json
import os


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ["PARTWAY_GPU_REPORT"], "a") as file:
            file.write(
                json.dumps({"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}) + "\n"
            )
