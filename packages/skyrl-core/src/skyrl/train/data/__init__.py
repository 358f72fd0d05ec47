"""Which prompts a run sees, and in which order."""
