"""The seam between a trainer and its rollout servers: protocol, client, server kit, weight transports."""

import os

# grpc reads it when it is imported. Its own fork handlers abort a forked child while another thread calls: seen in one
# of seven children. Our children, and those that Ray starts, only exec, and need no handler.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
