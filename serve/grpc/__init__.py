"""gRPC on top of HTTP/2: the inference service of the Open Inference Protocol."""
