"""A checkpoint of training state that any number of ranks of any backend wrote, and any number of any other reads."""
