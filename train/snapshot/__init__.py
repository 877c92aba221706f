"""The state of training in the memory of its machines, so that a lost process or machine costs few steps."""

from train.snapshot.memory import open_memory
from train.snapshot.mirrors import Mirrors
from train.snapshot.revival import newest_snapshot

__all__ = ["Mirrors", "newest_snapshot", "open_memory"]
