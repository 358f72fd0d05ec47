"""The trainer's end of a gloo group of two: `python gloo_trainer.py PORT WEIGHTS.safetensors`, then "listens".

Broadcasts every tensor in the order of its name, as bytes, and ends with 0 once the other side has them.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from safetensors.torch import load_file
from torch import uint8
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

TIMEOUT = timedelta(seconds=60)

if __name__ == "__main__":
    weights = load_file(sys.argv[2])
    store = TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    print("listens", flush=True)
    group = ProcessGroupGloo(PrefixStore("weights", store), 0, 2, TIMEOUT)
    for name in sorted(weights):
        group.broadcast(weights[name].contiguous().view(-1).view(uint8), root=0).wait()
