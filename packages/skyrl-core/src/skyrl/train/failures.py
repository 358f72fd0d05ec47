"""What ends a run although nothing in it is wrong: a server, a worker or an environment failed, and the message says
which."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """The base of such errors. Its message alone explains it; no traceback is shown for it."""
