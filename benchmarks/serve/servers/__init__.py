"""Peers in the serving benchmark; each runs in its own environment and imports nothing of this project.

Arguments of each: MODEL.onnx, HTTP port, gRPC port, and threads per inference.
"""
