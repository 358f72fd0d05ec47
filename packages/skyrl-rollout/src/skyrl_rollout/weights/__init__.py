"""Weights on their way from a trainer to a server: layout, digests and the ways the bytes travel."""
