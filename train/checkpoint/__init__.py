"""Checkpoints: complete and verified, or absent. Written while training goes on, shared out anew when they are read."""

from train.checkpoint.saved import Saved
from train.checkpoint.store import CheckpointStore
from train.state import Progress, State

__all__ = ["CheckpointStore", "Progress", "Saved", "State"]
