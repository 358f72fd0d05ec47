"""A process that talks to a server may start others."""

import subprocess
import sys

FORKS_WHILE_IT_CALLS = """
import subprocess, threading, time
from skyrl_rollout.health import is_serving

def call():
    while True:
        is_serving("grpc://127.0.0.1:9")

for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.2)
# with a preexec_fn, which is how Ray starts its processes, Python forks
codes = [subprocess.run(["true"], preexec_fn=lambda: None, timeout=10).returncode for _ in range(60)]
print(sorted(set(codes)))
"""


def test_children_of_a_process_that_calls_live_to_their_exec() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS_WHILE_IT_CALLS], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[0]", done.stdout + done.stderr[-2000:]
