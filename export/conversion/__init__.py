"""From torch to an ONNX file: trace, names, shapes, conversion and optimization."""
