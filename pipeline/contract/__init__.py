"""Contracts shared by every stage; imports none of ours and stays importable without torch."""
