"""What `rlplane demo --json` prints is JSON, whatever the libraries below it print."""

import json
import sys

from tests.warm_workers import run_warm

PROGRAM = """
import sys
from rlplane.demo import job
run = job.Job.run

def noisy(self):
    print("(raylet) WARNING: 8 PYTHON worker processes have been started")
    return run(self)

job.Job.run = noisy
from rlplane.cli import main
sys.argv = ["rlplane", "demo", "--backend", "memory", "--steps", "1", "--json", "--out", sys.argv[1]]
main()
"""


def test_a_library_that_prints_does_not_spoil_the_json(tmp_path):
    done = run_warm([sys.executable, "-c", PROGRAM, str(tmp_path)], timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"]
    assert "(raylet) WARNING" in done.stderr
