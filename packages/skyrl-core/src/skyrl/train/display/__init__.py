"""What a person sees of a run: the live line, the closing table and the reward curve."""
