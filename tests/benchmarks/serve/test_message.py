"""The hand-made gRPC request is valid protobuf."""

from __future__ import annotations

from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from benchmarks.serve.message import framed, infer_request


def test_request_is_parsed_by_kserves_protobuf() -> None:
    raw = bytes(range(256)) * 3
    message = pb.ModelInferRequest.FromString(infer_request("net", "x", "FP32", (1, 192, 300), raw))
    assert message.model_name == "net"
    assert list(message.raw_input_contents) == [raw]
    (tensor,) = message.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("x", "FP32", [1, 192, 300])


def test_frame_begins_with_compression_flag_and_length() -> None:
    assert framed(b"abc") == b"\0\0\0\0\x03abc"
