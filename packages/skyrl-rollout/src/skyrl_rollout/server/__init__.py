"""The server kit: everything of a rollout server that is the same for every engine."""

from skyrl_rollout.server.options import ServerOptions, add_server_options, options_from
from skyrl_rollout.server.serve import serve

__all__ = ["ServerOptions", "add_server_options", "options_from", "serve"]
