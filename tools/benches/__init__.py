"""What `tools/bench.py` measures: a file per name in its table, and the processes that they start."""
