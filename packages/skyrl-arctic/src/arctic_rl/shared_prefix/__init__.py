"""Computes the prompt of a group once: packing, attention, LM head, what is covered and when it pays."""
