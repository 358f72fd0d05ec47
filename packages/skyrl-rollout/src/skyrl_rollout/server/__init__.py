"""The server kit: everything of a rollout server that is the same for every engine."""

from skyrl_rollout.server.lifetime import ParentWatch
from skyrl_rollout.server.options import ServerOptions, add_server_options, options_from
from skyrl_rollout.server.serve import refuse_taken_address, serve

__all__ = [
    "ParentWatch",
    "ServerOptions",
    "add_server_options",
    "options_from",
    "refuse_taken_address",
    "serve",
]
