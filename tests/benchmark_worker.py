"""A worker that does as it is told: ``python -m tests.benchmark_worker JOB RESULTS``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from benchmarks.processes import Results


def main() -> None:
    for action, value in json.loads(sys.argv[1])["do"]:
        if action == "add":
            Results(sys.argv[2]).add(value)
        elif action == "raise":
            raise RuntimeError(value)
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "start":
            sleeper = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({value})"])
            Results(sys.argv[2]).add({"started": sleeper.pid})
        elif action == "sleep":
            time.sleep(value)


if __name__ == "__main__":
    main()
