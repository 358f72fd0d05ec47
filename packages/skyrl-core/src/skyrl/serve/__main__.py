"""`python -m skyrl.serve`, where the script `skyrl-serve` is not on the path."""

import sys

from skyrl.serve.cli import main

sys.exit(main())
