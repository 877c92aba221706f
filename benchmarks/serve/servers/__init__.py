"""What ours is measured beside; each runs in an environment of its own and imports nothing of ours.

Every one is told MODEL.onnx, its HTTP port, its gRPC port and the threads inside one inference.
"""
