"""Contracts shared by every stage; imports none of ours and stays importable without torch."""

__version__ = "0.1.0"
