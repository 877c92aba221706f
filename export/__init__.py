"""The export step: model → ONNX → verified → bundle."""

import os

# Read when torch loads. An export runs many small operations, and threads that wait for the next one actively cost more
# CPU time than the operations where other processes use the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
