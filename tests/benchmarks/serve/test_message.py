"""The hand-made gRPC request is what the protocol's own code makes."""

from __future__ import annotations

from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from benchmarks.serve.message import framed, infer_request


def test_a_request_reads_as_it_was_meant() -> None:
    raw = bytes(range(256)) * 3
    message = pb.ModelInferRequest.FromString(infer_request("net", "x", "FP32", (1, 192, 300), raw))
    assert message.model_name == "net"
    assert list(message.raw_input_contents) == [raw]
    (tensor,) = message.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("x", "FP32", [1, 192, 300])


def test_a_frame_begins_with_no_compression_and_its_length() -> None:
    assert framed(b"abc") == b"\0\0\0\0\x03abc"
