"""Write models with random weights as people have them: folders of transformers, and weights of networks."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks.architectures.names import EXCEPTIONS, SMALL, TEXT_IDS, class_names

_WORDS = "I have never seen a better film . Perhaps cold soup ! Once upon time The capital of France is To be or was"
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_LONGEST = 40  # tokens
_ROUNDING, _SHARE, _MOST_TIMES = 2e-5, 0.97, 12


def write_source(name: str, kind: str, folder: Path) -> tuple[str, ...]:
    """Write a model with random weights; return the arguments of `pipe export`."""
    import torch

    torch.manual_seed(0)
    library, _, model = name.partition(":")
    if library == "transformers":
        (folder / "model").mkdir()
        _write_folder(model, kind, folder / "model")
        return ("model",)
    torch.save(randomize(_network(library, model), 224).state_dict(), folder / "weights.pt")
    return (name, "--weights", "weights.pt")


def randomize(model: Any, side: int = 0) -> Any:
    """Draw all weights, for pictures of this size: libraries begin with zeros and numbers that hide a mistake."""
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.numel():
                weight.normal_(0, weight[0].numel() ** -0.5)
            elif weight.numel() and weight.min() == weight.max():
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.eval()
    if side:
        layers = [
            module for module in model.modules() if hasattr(module, "dilation") or hasattr(module, "out_features")
        ]
        hooks = [layer.register_forward_hook(_scale) for layer in layers]
        with torch.no_grad(), contextlib.suppress(Exception):  # then it takes something else than pictures
            model(torch.randn(2, 3, side, side))
        for hook in hooks:
            hook.remove()
        for _ in range(_MOST_TIMES):
            if _rounding(model, side) < _ROUNDING:
                break
            for weight in (layer.weight for layer in layers if hasattr(layer, "weight")):
                weight.data *= _SHARE
    return model


def _rounding(model: Any, side: int) -> float:
    """Return the error of float32, as a share of the spread: a network that amplifies it would show nothing else."""
    import torch

    with torch.no_grad(), contextlib.suppress(Exception):  # as above
        pictures = torch.rand(4, 3, side, side) * 5 - 2.5
        outputs = model(pictures), copy.deepcopy(model).double()(pictures.double())
        single, double = (getattr(output, "logits", output) for output in outputs)
        return float((single - double).abs().max() / double.std())
    return 0.0


def _scale(layer: Any, _: Any, output: Any) -> Any:
    """Give a convolution, or the last layer, outputs of about one: deep networks would answer without their input."""
    if not hasattr(layer, "weight") or output.ndim not in (2, 4):
        return output
    spread = output.std(dim=(0, 2, 3)).mean() if output[0, 0].numel() > 1 else output.std()
    spread = spread.clamp(min=1e-6)
    layer.weight /= spread
    return output / spread


def _network(library: str, name: str) -> Any:
    if library == "timm":
        return importlib.import_module("timm").create_model(name, num_classes=10)
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    models: Any = importlib.import_module("torchvision.models")
    return models.get_model(name, weights=None, num_classes=10, **options)


def _write_folder(model_type: str, kind: str, folder: Path) -> None:
    import transformers

    architecture = class_names()[kind][model_type]
    architecture = architecture if isinstance(architecture, str) else architecture[0]
    if kind == "speech":
        from tests.given.folders import make_whisper

        make_whisper(folder)
        return
    target = folder / "0_Transformer" if kind == "embeddings" else folder
    config = tiny_config(model_type, kind)
    model = getattr(transformers, architecture)(config)
    randomize(model, _side(config) if kind in ("images", "boxes") else 0).save_pretrained(target)
    if kind in ("images", "boxes"):
        _write_image_processor(model_type, kind, model.config, folder)
    elif kind in ("sounds", "ctc"):
        _write_sound_files(model_type, kind, folder)
    else:
        _write_tokenizer(kind, target)
    if kind == "embeddings":
        _write_pooling(folder)


def _side(config: Any) -> int:
    side = getattr(config, "image_size", None) or SMALL["image_size"]
    return int(side[0] if isinstance(side, list | tuple) else side)


def tiny_config(model_type: str, kind: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    sizes = _small(config, kind)
    for name, value in EXCEPTIONS.get(model_type, {}).items():
        sizes[name] = sizes.get(name, {}) | value if isinstance(value, dict) else value
    return config(**{name: value for name, value in sizes.items() if value is not None})


def _small(config: Any, kind: str) -> dict[str, Any]:
    """Return small values for what a configuration has, and for the configurations in it."""
    default = config()
    small: dict[str, Any] = {
        name: _shrink(name, value) for name, value in vars(default).items() if _shrink(name, value) != value
    }
    for name, part in (config.sub_configs or {}).items():
        if isinstance(getattr(default, name, None), part) and hasattr(part, "model_type"):
            small[name] = _small(part, kind)
    if kind in ("images", "boxes", "texts", "tokens", "sounds"):
        small |= {"id2label": {0: "good", 1: "bad", 2: "so-so"}, "label2id": {"good": 0, "bad": 1, "so-so": 2}}
    if kind not in ("images", "boxes"):
        small |= {name: value for name, value in TEXT_IDS.items() if hasattr(default, name)}
    return small


def _shrink(name: str, value: Any) -> Any:
    """Return a smaller value for sizes; all stages of a network of pictures keep their width, but one layer each."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if name in ("depths", "layers", "num_layers_list") and is_list and all(isinstance(item, int) for item in value):
        return [1] * len(value)
    if name in ("num_heads", "num_attention_heads") and is_list and all(isinstance(item, int) for item in value):
        return [min(2, item) for item in value]
    if name == "conv_dim" and is_list:
        return [8] * len(value)
    if name == "image_size" and is_list:
        return [SMALL[name]] * len(value)
    is_size = name in SMALL and isinstance(value, int) and not isinstance(value, bool)
    return min(value, SMALL[name]) if is_size else value


def _write_image_processor(model_type: str, kind: str, config: Any, folder: Path) -> None:
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    usual = "ViTImageProcessorPil" if kind == "images" else "ConditionalDetrImageProcessorPil"
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {"pil": usual}
    create = getattr(transformers, names.get("pil") or names["torchvision"])
    side = _side(config)
    size = create().to_dict().get("size") or {}
    edges = {"shortest_edge": side, "longest_edge": 2 * side, "height": side, "width": side}
    options: dict[str, Any] = {"size": {name: edges[name] for name in size if name in edges}} if size else {}
    if getattr(create(), "crop_size", None):
        options["crop_size"] = {"height": side, "width": side}
    create(**options).save_pretrained(folder)


def _write_sound_files(model_type: str, kind: str, folder: Path) -> None:
    import transformers
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES

    getattr(
        transformers, FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type, "Wav2Vec2FeatureExtractor")
    )().save_pretrained(folder)
    if kind == "ctc":
        words = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
        words += [f"<{number}>" for number in range(SMALL["vocab_size"] - len(words))]
        (folder / "words.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
        transformers.Wav2Vec2CTCTokenizer(str(folder / "words.json")).save_pretrained(folder)


def _write_tokenizer(kind: str, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = list(dict.fromkeys([*_SPECIAL, *_WORDS.split()]))
    words += [f"w{number}" for number in range(SMALL["vocab_size"] - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=_SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind != "language":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    roles = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "bos": 2, "eos": 3}
    special = {f"{role}_token": _SPECIAL[i] for role, i in roles.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=_LONGEST, **special).save_pretrained(folder)


def _write_pooling(folder: Path) -> None:
    parts = {"0_Transformer": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{module}"}
        for i, (path, module) in enumerate(parts.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    settings = {"max_seq_length": _LONGEST, "do_lower_case": False}
    (folder / "0_Transformer" / "sentence_bert_config.json").write_text(json.dumps(settings))
