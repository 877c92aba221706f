"""Greedy decoding of one decoder by the service's engine and by other libraries."""
