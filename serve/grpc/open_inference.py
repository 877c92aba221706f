"""The protobuf messages of the Open Inference Protocol, and its service with those methods of Triton that we answer."""

from __future__ import annotations

from serve.grpc.descriptors import ProtoFile

_PACKAGE = "inference"
SERVICE = f"{_PACKAGE}.GRPCInferenceService"
METHODS = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "ModelStatistics",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
)
TENSOR_FIELDS, RAW_CONTENTS_FIELD = (5, 6), 7  # of a request
_SHARED_MEMORY = "this service shares no memory with clients; send tensors in raw_input_contents"
# Methods of Triton that the service refuses, and what to use instead.
REFUSED = {
    "ModelStreamInfer": "this service answers one request at a time; use ModelInfer, or /openai/v1 over HTTP for texts",
    "ModelConfig": "models have no Triton configuration; ModelMetadata has their inputs, outputs and properties",
    "TraceSetting": "traces are set by the OTEL_ variables of the service, never by clients",
    "LogSettings": "logs are set by --log-format and serve.log_requests, never by clients",
    **{
        f"{kind}SharedMemory{action}": _SHARED_MEMORY
        for kind in ("System", "Cuda")
        for action in ("Status", "Register", "Unregister")
    },
}
_MESSAGES = """
message ServerLiveRequest
message ServerLiveResponse
  bool live = 1
message ServerReadyRequest
message ServerReadyResponse
  bool ready = 1
message ModelReadyRequest
  string name = 1
  string version = 2
message ModelReadyResponse
  bool ready = 1
message ServerMetadataRequest
message ServerMetadataResponse
  string name = 1
  string version = 2
  repeated string extensions = 3
message ModelMetadataRequest
  string name = 1
  string version = 2
message ModelMetadataResponse
  string name = 1
  repeated string versions = 2
  string platform = 3
  repeated TensorMetadata inputs = 4
  repeated TensorMetadata outputs = 5
  map string properties = 6
message ModelMetadataResponse.TensorMetadata
  string name = 1
  string datatype = 2
  repeated int64 shape = 3
message ModelInferRequest
  string model_name = 1
  string model_version = 2
  string id = 3
  map InferParameter parameters = 4
  repeated InferInputTensor inputs = 5
  repeated InferRequestedOutputTensor outputs = 6
  repeated bytes raw_input_contents = 7
message ModelInferRequest.InferInputTensor
  string name = 1
  string datatype = 2
  repeated int64 shape = 3
  map InferParameter parameters = 4
  InferTensorContents contents = 5
message ModelInferRequest.InferRequestedOutputTensor
  string name = 1
  map InferParameter parameters = 2
message ModelInferResponse
  string model_name = 1
  string model_version = 2
  string id = 3
  map InferParameter parameters = 4
  repeated InferOutputTensor outputs = 5
  repeated bytes raw_output_contents = 6
message ModelInferResponse.InferOutputTensor
  string name = 1
  string datatype = 2
  repeated int64 shape = 3
  map InferParameter parameters = 4
  InferTensorContents contents = 5
message InferParameter
  oneof:parameter_choice bool bool_param = 1
  oneof:parameter_choice int64 int64_param = 2
  oneof:parameter_choice string string_param = 3
  oneof:parameter_choice double double_param = 4
  oneof:parameter_choice uint64 uint64_param = 5
message InferTensorContents
  repeated bool bool_contents = 1
  repeated int32 int_contents = 2
  repeated int64 int64_contents = 3
  repeated uint32 uint_contents = 4
  repeated uint64 uint64_contents = 5
  repeated float fp32_contents = 6
  repeated double fp64_contents = 7
  repeated bytes bytes_contents = 8
message RepositoryIndexRequest
  string repository_name = 1
  bool ready = 2
message RepositoryIndexResponse
  repeated ModelIndex models = 1
message RepositoryIndexResponse.ModelIndex
  string name = 1
  string version = 2
  string state = 3
  string reason = 4
message ModelStatisticsRequest
  string name = 1
  string version = 2
message ModelStatisticsResponse
  repeated ModelStatistics model_stats = 1
message ModelStatistics
  string name = 1
  string version = 2
  uint64 last_inference = 3
  uint64 inference_count = 4
  uint64 execution_count = 5
  InferStatistics inference_stats = 6
  repeated InferBatchStatistics batch_stats = 7
message InferStatistics
  StatisticDuration success = 1
  StatisticDuration fail = 2
  StatisticDuration queue = 3
  StatisticDuration compute_input = 4
  StatisticDuration compute_infer = 5
  StatisticDuration compute_output = 6
  StatisticDuration cache_hit = 7
  StatisticDuration cache_miss = 8
message InferBatchStatistics
  uint64 batch_size = 1
  StatisticDuration compute_input = 2
  StatisticDuration compute_infer = 3
  StatisticDuration compute_output = 4
message StatisticDuration
  uint64 count = 1
  uint64 ns = 2
message RepositoryModelLoadRequest
  string model_name = 1
message RepositoryModelLoadResponse
  string model_name = 1
  bool isLoaded = 2
message RepositoryModelUnloadRequest
  string model_name = 1
message RepositoryModelUnloadResponse
  string model_name = 1
  bool isUnloaded = 2
"""
_SERVICE_TABLE = "\n".join(
    ["service GRPCInferenceService", *(f"  rpc {name} {name}Request {name}Response" for name in METHODS)]
)
FILE = ProtoFile("open_inference_grpc.proto", _PACKAGE, _MESSAGES + _SERVICE_TABLE)

message_class = FILE.message_class
ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
ModelMetadataResponse = message_class("ModelMetadataResponse")
ModelReadyResponse = message_class("ModelReadyResponse")
ModelStatisticsResponse = message_class("ModelStatisticsResponse")
RepositoryIndexResponse = message_class("RepositoryIndexResponse")
ServerLiveResponse = message_class("ServerLiveResponse")
ServerMetadataResponse = message_class("ServerMetadataResponse")
ServerReadyResponse = message_class("ServerReadyResponse")
