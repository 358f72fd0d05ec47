"""The checks, by theme; which number each has stands in `conformance.table`."""
