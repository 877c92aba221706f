"""Whether the ONNX file computes what torch computes, and where it begins to differ."""
