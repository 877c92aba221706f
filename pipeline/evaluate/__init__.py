"""The evaluate step: candidate and baseline on the same samples, a paired comparison, one verdict."""
