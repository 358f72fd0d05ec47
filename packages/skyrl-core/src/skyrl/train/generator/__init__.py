"""How prompts become scored trajectories, and what is measured on them."""
