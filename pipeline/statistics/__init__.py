"""Confidence intervals, significance tests and power for differences measured on a test set."""
