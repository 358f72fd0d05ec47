"""Where the rollouts of a step come from, and when they are made."""
