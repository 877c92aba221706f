"""Pretrained weights: matched with a task's model, and read by the processes that keep them."""
