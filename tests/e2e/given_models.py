"""Models that exist already, as people have them: a class with its weights, programs, files of ONNX, folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from onnx import TensorProto, checker, helper, save
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, image):
        return self.out(self.norm(self.conv(image)).relu().mean((2, 3)))
"""
INPUT = "image=float32[batch,3,16,16]"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [*SPECIAL, *"I have never seen a better film . Perhaps cold soup !".split()]  # noqa: SIM905


def write_net(folder: Path, seed: int = 0) -> nn.Module:
    """Write net.py, and its weights as a pickle of a state dict."""
    (folder / "net.py").write_text(NET)
    names: dict[str, type[nn.Module]] = {}
    exec(NET, names)
    torch.manual_seed(seed)
    model = names["Net"]().eval()
    torch.save(model.state_dict(), folder / "net.pt")
    return model


def write_program(folder: Path, model: nn.Module) -> None:
    shapes = {"image": {0: torch.export.Dim("rows")}}
    program = torch.export.export(model, (torch.randn(4, 3, 16, 16),), dynamic_shapes=shapes)
    torch.export.save(program, folder / "net.pt2")


COEFFICIENTS = [0.5, -1.0, 0.3, 2.0, 1.0, -2.0]


def write_classifier(path: Path, batch: int | None = None, coefficients: Sequence[float] = COEFFICIENTS) -> None:
    """Write a linear classifier in the operators, and with the dictionaries, of scikit-learn's converters."""
    classifier = helper.make_node(
        "LinearClassifier", ["X"], ["label", "scores"], domain="ai.onnx.ml", classlabels_ints=[0, 1, 2],
        coefficients=list(coefficients), intercepts=[0.1, 0.0, -0.1], post_transform="SOFTMAX",
    )  # fmt: skip
    maps = helper.make_node("ZipMap", ["scores"], ["probabilities"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])
    number = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, number))
    graph = helper.make_graph(
        [classifier, maps],
        "g",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [batch, 2])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [None]),
            helper.make_value_info("probabilities", kind),
        ],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    checker.check_model(model)
    save(model, path)


def write_bert(folder: Path, task: str = "texts") -> None:
    torch.manual_seed(0)
    labels = {"texts": {0: "bad", 1: "so-so", 2: "good"}, "tokens": {0: "O", 1: "B-PER", 2: "I-PER"}}[task]
    kind = {"texts": BertForSequenceClassification, "tokens": BertForTokenClassification}[task]
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=40, initializer_range=0.5, id2label=labels,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=40,
    ).save_pretrained(folder)  # fmt: skip


def write_vit(folder: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        initializer_range=0.5, id2label=dict(enumerate("abcd")),
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


def write_own_bert(folder: Path) -> None:
    """Write a folder whose classes are files in it: the logits are those of BERT with the other sign."""
    write_bert(folder)
    (folder / "configuration_own.py").write_text(
        'from transformers import BertConfig\n\n\nclass OwnConfig(BertConfig):\n    model_type = "own"\n'
    )
    (folder / "modeling_own.py").write_text(_OWN)
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForSequenceClassification": "modeling_own.OwnModel"}
    own = {"model_type": "own", "architectures": ["OwnForSequenceClassification"], "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config | own))


_OWN = """
from transformers import BertForSequenceClassification

from .configuration_own import OwnConfig


class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output
"""
