"""`python -m benchmarks.architectures`: send each architecture of transformers, timm and torchvision to `pipe export`.

Each is made from a tiny configuration with random weights, without the network. The rows go to architectures.jsonl,
and those that are there are not run again; docs/architectures.md is written from them. An architecture is a module of
its library, in the kind that fits it best.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import psutil

from pipeline.executors.local import OF_ALL_STEPS, fork_server, step_environment
from pipeline.system.torchvision_operators import declare_torchvision_operators

ROOT = Path(__file__).resolve().parents[1]
ROWS, TABLE = ROOT / "benchmarks" / "architectures.jsonl", ROOT / "docs" / "architectures.md"
SECONDS = 600
_WORDS = "I have never seen a better film . Perhaps cold soup ! Once upon time The capital of France is To be or was"
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_LONGEST = 40  # tokens

# The smallest network of each module of the library that has classifiers.
_TORCHVISION = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 googlenet inception_v3 maxvit_t mnasnet0_5 mobilenet_v2 "
    "mobilenet_v3_small regnet_x_400mf resnet18 shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11 vit_b_32"
)
_TIMM = """
beit_base_patch16_224 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 cpubone_nano crossvit_tiny_240
cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small
efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim_dw
fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gernet_s ghostnet_050 gmlp_ti16_224 halonet_h1 hardcorenas_b
hgnetv2_b0 hiera_tiny_224 hieradet_small hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2
inception_v3 inception_v4 lcnetv2_small legacy_seresnet18 legacy_xception levit_128s lowformer_b0 mnasnet_small
mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_gap nasnetalarge nest_tiny
nextvit_small pit_ti_224 pnasnet5large poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1
res2next50 resnest14d resnet10t resnetv2_18 rexnet_100 samvit_base_patch16_224 selecsls42 sequencer2d_s shvit_s1
skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256
test_coatnet test_convnext test_mambaout test_nfnet test_vit test_vit_relpos tiny_vit_5m_224 tnt_s_legacy_patch16_224
tresnet_m twins_svt_small vgg11 visformer_tiny vit_small_patch16_rope_224 vit_tiny_r_s16_p8_224 vitamin_small_224
volo_d1_224 xception41p xcit_nano_12_p8_224
"""

# Of the language models that are written as changes of another one, the best known.
_DERIVED = (
    "apertus biogpt bitnet cohere cohere2 deepseek_v3 ernie4_5 exaone4 falcon_mamba gemma gemma2 glm4 gpt_neox gpt_oss "
    "granite granitemoe helium jamba lfm2 mistral mixtral modernbert-decoder olmo2 olmoe phi phi3 qwen2 qwen2_moe "
    "qwen3 qwen3_moe smollm3 starcoder2 zamba2"
)
_TAGGERS = ("bros", "layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "luke", "markuplm")
_EMBEDDERS = ("albert", "distilbert", "gte", "jina_embeddings_v3", "modernbert", "mpnet", "nomic_bert", "xlm-roberta")
# Pictures or sounds beside texts; and the networks of timm, which are in the list.
_LEFT_OUT = ("modernvbert", "qwen3_asr", "shieldgemma2", "t5gemma2", "timm_wrapper", "ultravbert")

_SMALL: Mapping[str, int] = {
    name: size
    for size, names in {
        1: "depth num_blocks",
        2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers layers "
        "num_key_value_heads num_experts_per_tok num_self_attends_per_block speech_encoder_layers",
        4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
        "num_local_experts n_routed_experts attention_heads rotary_dim",
        8: "head_dim kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim",
        16: "q_lora_rank kv_lora_rank num_queries num_latents num_conv_pos_embeddings",
        32: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size d_embed d_latents encoder_hidden_dim",
        64: "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim d_inner moe_intermediate_size vocab_size "
        "max_position_embeddings n_positions image_size max_2d_position_embeddings",
    }.items()
    for name in names.split()
}
_TEXT_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
# What some need besides; a configuration must fit together.
_EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "esm": {"vocab_size": 64},
    "esmc": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 32, "hidden_dim": 32}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 16},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "mistral4": {"head_dim": 16, "num_key_value_heads": 4},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 8)},
    "rt_detr": {"decoder_in_channels": [32, 32, 32]},
    **{name: {"window_size": 2} for name in ("donut-swin", "swin", "swinv2")},
    **{name: {"decoder_start_token_id": 0} for name in ("t5", "mt5", "umt5")},
    **{name: {"vocab_size": 64} for name in ("wav2vec2-bert", "wav2vec2-conformer")},
    "xmod": {"default_language": "en_XX"},
    **{name: {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2} for name in ("zamba", "zamba2")},
}


def architectures() -> dict[str, str]:
    """Return the kind of each architecture by its name, as in `transformers:bert`."""
    networks = {"timm": _TIMM.split(), "torchvision": _TORCHVISION.split()}
    rows = {f"transformers:{name}": kind for name, kind in _model_types().items()}
    return rows | {f"{library}:{name}": "images" for library, names in networks.items() for name in names}


def _model_types() -> dict[str, str]:
    """Return the model types of transformers, one of each of its modules, with the kind that fits best."""
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    classes, kinds, modules = _classes(), {}, set()
    for name in sorted({name for names in classes.values() for name in names}):
        module = model_type_to_module_name(name)
        if module in modules or name in _LEFT_OUT or name not in CONFIG_MAPPING:
            continue
        config = CONFIG_MAPPING[name]
        if config.model_type != name:  # another name of the same classes
            continue
        candidates = [kind for kind, names in classes.items() if name in names]
        if getattr(config, "is_encoder_decoder", False) or name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            candidates = [kind for kind in candidates if kind != "language"]
        is_derived = any((Path(transformers.__file__).parent / "models" / module).glob("modular_*.py"))
        if candidates[:1] == ["language"] and (config.sub_configs or (is_derived and name not in _DERIVED.split())):
            continue
        if candidates:
            modules.add(module)
            chosen = {**dict.fromkeys(_TAGGERS, "tokens"), **dict.fromkeys(_EMBEDDERS, "embeddings")}
            kinds[name] = chosen.get(name, candidates[0])
    return kinds


def _classes() -> dict[str, dict[str, Any]]:
    """Return the classes of the kinds that `pipe export` takes, by their model types."""
    from transformers.models.auto import modeling_auto as auto

    boxes = auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES
    endings = ("DetrForObjectDetection", "YolosForObjectDetection", "TableTransformerForObjectDetection")
    return {
        "images": dict(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        "boxes": {name: architecture for name, architecture in boxes.items() if architecture.endswith(endings)},
        "speech": {"whisper": "WhisperForConditionalGeneration"},
        "ctc": dict(auto.MODEL_FOR_CTC_MAPPING_NAMES),
        "sounds": dict(auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
        "language": dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "texts": dict(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        "tokens": dict(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        "embeddings": {name: auto.MODEL_MAPPING_NAMES[name] for name in _EMBEDDERS},
    }


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
        hooks = [module.register_forward_hook(_scale) for module in model.modules() if hasattr(module, "dilation")]
        with torch.no_grad(), contextlib.suppress(Exception):  # then it takes something else than pictures
            model(torch.randn(2, 3, side, side))
        for hook in hooks:
            hook.remove()
    return model


def _scale(layer: Any, _: Any, output: Any) -> Any:
    """Give a convolution outputs of about one, or the answers of deep networks hang on no pixel."""
    if not hasattr(layer, "weight") or output.ndim != 4:
        return output
    spread = output.std(dim=(0, 2, 3)).mean().clamp(min=1e-6)
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

    architecture = _classes()[kind][model_type]
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
        _write_image_processor(model_type, model.config, folder)
    elif kind in ("sounds", "ctc"):
        _write_sound_files(model_type, kind, folder)
    else:
        _write_tokenizer(kind, target)
    if kind == "embeddings":
        _write_pooling(folder)


def _side(config: Any) -> int:
    side = getattr(config, "image_size", None) or _SMALL["image_size"]
    return int(side[0] if isinstance(side, list | tuple) else side)


def tiny_config(model_type: str, kind: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    sizes = _small(config, kind)
    for name, value in _EXCEPTIONS.get(model_type, {}).items():
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
        small |= {name: value for name, value in _TEXT_IDS.items() if hasattr(default, name)}
    return small


def _shrink(name: str, value: Any) -> Any:
    """Return a smaller value for sizes; all stages of a network of pictures keep their width, but one layer each."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if name in ("depths", "layers", "num_layers_list") and is_list and all(isinstance(item, int) for item in value):
        return [1] * len(value)
    if name in ("num_heads", "num_attention_heads") and is_list and all(isinstance(item, int) for item in value):
        return [min(2, item) for item in value]
    if name == "image_size" and is_list:
        return [_SMALL[name]] * len(value)
    is_size = name in _SMALL and isinstance(value, int) and not isinstance(value, bool)
    return min(value, _SMALL[name]) if is_size else value


def _write_image_processor(model_type: str, config: Any, folder: Path) -> None:
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {"pil": "ViTImageProcessorPil"}
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
        words += [f"<{number}>" for number in range(_SMALL["vocab_size"] - len(words))]
        (folder / "words.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
        transformers.Wav2Vec2CTCTokenizer(str(folder / "words.json")).save_pretrained(folder)


def _write_tokenizer(kind: str, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = list(dict.fromkeys([*_SPECIAL, *_WORDS.split()]))
    words += [f"w{number}" for number in range(_SMALL["vocab_size"] - len(words))]
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


_process = contextlib.ExitStack()  # what each process of the pool has until it ends


def start_process() -> None:
    """Start a fork server with the libraries, which `pipe export` uses as its own: each row would import them again."""
    declare_torchvision_operators()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    project = SimpleNamespace(task="task.py:Task", codec="codec.py:Codec")
    modules = ("timm.data", "torchvision", *OF_ALL_STEPS)
    server = fork_server(ROOT / "examples" / "given" / "texts", step_environment(1, 1), cast("Any", project), modules)
    os.environ |= _process.enter_context(server)


def run_row(name: str, kind: str) -> dict[str, Any]:
    """Make the model, export it, and return what is known of it."""
    row: dict[str, Any] = {"name": name, "kind": kind}
    with tempfile.TemporaryDirectory(prefix="architectures-") as temporary:
        folder = Path(temporary)
        try:
            source = write_source(name, kind, folder)
        except Exception as error:  # each library raises its own
            reason = f"not made from a tiny configuration: {type(error).__name__}: {error}"
            return {**row, "exported": False, "seconds": 0.0, "cpu": 0.0, "reason": _one_line(reason, folder)}
        begin, cpu = time.monotonic(), _child_seconds()
        status, output, errors = _run([*source, "--to", "project", "-o", "json"], folder)
        row |= {"seconds": round(time.monotonic() - begin, 1), "cpu": round(_child_seconds() - cpu, 1)}
        if status == 0:
            return {**row, "exported": True, **_facts(json.loads(output))}
        return {**row, "exported": False, "reason": _one_line(_reason(status, output + errors), folder)}


def _child_seconds() -> float:
    """Return the processor time of all that has been run, also by the fork server."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    servers = [child.cpu_times() for child in psutil.Process().children()]
    forked = sum(times.children_user + times.children_system for times in servers)
    return usage.ru_utime + usage.ru_stime + forked


def _run(arguments: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run `pipe export`; return the status, which is -9 if it took too long, and what it printed."""
    command = [sys.executable, "-m", "pipeline", "export", *arguments]
    with subprocess.Popen(
        command, cwd=folder, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.communicate()
            return -9, "", ""
    return process.returncode, output, errors


def _reason(status: int, printed: str) -> str:
    if status == -9:
        return f"took longer than {SECONDS} seconds"
    lines = [json.loads(line)["error"] for line in printed.splitlines() if line.startswith('{"error"')]
    return lines[-1] if lines else f"exit status {status}: {printed.strip().splitlines()[-1:]}"


def _one_line(reason: str, folder: Path) -> str:
    reason = " ".join(reason.replace(f"{folder}/", "").split())
    return re.sub(r"; its output is in \S+", "", reason)[:300]


def _facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dynamic axes, the largest difference from torch, and how many answers the library gives, too."""
    export = Path(facts["path"]) / "export"
    signature = json.loads((export / "bundle" / "signature.json").read_text())
    parity = json.loads((export / "parity.json").read_text())
    axes = {axis for spec in signature["inputs"] for axis in spec["shape"] if isinstance(axis, str)}
    answers = re.search(
        r"(\d+) answers equal to those of the model's own library", (export.parent / "logs" / "export.log").read_text()
    )
    return {
        "axes": sorted(axes),
        "difference": float(f"{max(run['max_abs_error'] for run in parity['runs'] + parity['coverage']):.2g}"),
        "answers": int(answers[1]) if answers else 0,
    }


Rows = dict[str, dict[str, Any]]


def read_rows(path: Path = ROWS) -> tuple[dict[str, Any], Rows]:
    """Return the first line, with date and versions, and the rows by name."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return (lines[0] if lines else {}), {row["name"]: row for row in lines[1:]}


def write_rows(rows: Rows, path: Path) -> None:
    packages = ("torch", "transformers", "timm", "torchvision", "onnx", "onnxruntime")
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: metadata.version(name) for name in packages},
    }
    path.write_text("".join(json.dumps(line) + "\n" for line in (about, *(rows[name] for name in sorted(rows)))))


def passes(row: Mapping[str, Any]) -> bool:
    """Return whether it was exported, equal to torch at every batch size, with the library's own answers."""
    return bool(row["exported"] and "batch" in row["axes"] and row["answers"])


def by_library(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    libraries = ("transformers", "timm", "torchvision")
    return {library: [row for name, row in rows.items() if name.startswith(library)] for library in libraries}


_DOCUMENT = """# Architectures

What `pipe export` makes of the architectures of {libraries}: one network of each module of these libraries, tiny where
the library allows, with random weights. For causal language models that are changes of another one, and those with
pictures or sounds beside texts, the list is not complete.

An architecture passes if `pipe export` wrote a bundle with a dynamic batch, and other axes as named, whose outputs are
those of torch at every size that was compared, and whose answers to requests are those of the library itself.

{passed} of {count} pass. {date}, {versions}; seconds of one core.

| library | pass | of | median seconds |
|---|---|---|---|
{counts}

`python -m benchmarks.architectures --table docs/architectures.md` runs what has no row in
`benchmarks/architectures.jsonl`, which has all numbers, and writes this page from it.

## Those that pass

| library, kind | dynamic axes | largest difference | names |
|---|---|---|---|
{groups}

## Those that fail

| reason | names |
|---|---|
{failures}
"""


def make_table(about: Mapping[str, Any], rows: Rows) -> str:
    libraries, good = by_library(rows), [row for row in rows.values() if passes(row)]
    groups, failures = defaultdict(list), defaultdict(list)
    for name, row in sorted(rows.items()):
        library, _, model = name.partition(":")
        if passes(row):
            kind = f"{library}, {row['kind']}" if library == "transformers" else library
            groups[kind, ", ".join(row["axes"])].append((model, row["difference"]))
        else:
            failures[_shown_reason(row)].append(name if library != "transformers" else model)
    counts = [
        (library, sum(map(passes, members)), len(members), round(median(row["cpu"] for row in members)))
        for library, members in libraries.items()
        if members
    ]
    shown = [
        (kind, axes, f"{max(difference for _, difference in members):.1g}", ", ".join(name for name, _ in members))
        for (kind, axes), members in groups.items()
    ]
    return _DOCUMENT.format(
        libraries="transformers, timm and torchvision", passed=len(good), count=len(rows), date=about["date"],
        versions=", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        counts=_lines(counts), groups=_lines(shown),
        failures=_lines((reason, ", ".join(names)) for reason, names in failures.items()),
    )  # fmt: skip


def _shown_reason(row: Mapping[str, Any]) -> str:
    text = row.get("reason") or "no answers were compared"
    return text.replace("|", "\\|").replace("<", "&lt;")


def _lines(rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.architectures", description=__doc__)
    parser.add_argument("names", nargs="*", help="as transformers:bert; default: all that have no row")
    parser.add_argument("--again", choices=("failed",), help="also run those that failed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the results, one JSON object a line")
    parser.add_argument("--table", type=Path, help=f"also write the document, as {TABLE.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    declare_torchvision_operators()
    kinds, rows = architectures(), read_rows(options.rows)[1]
    left = [name for name in kinds if name not in rows or (options.again and not passes(rows[name]))]
    left.sort(key=lambda name: (":" in name and not name.startswith("tr"), hashlib.sha256(name.encode()).hexdigest()))
    left = options.names or left
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, start_process) as pool:
        running = [pool.submit(run_row, name, kinds[name]) for name in left]
        for count, future in enumerate(as_completed(running), 1):
            row = future.result()
            rows[row["name"]] = row
            write_rows(rows, options.rows)
            print(f"{count}/{len(left)} {row['name']}: {row.get('reason') or 'ok'} ({row['seconds']} s)", flush=True)
    for library, members in by_library(rows).items():
        print(f"{library}: {sum(map(passes, members))} of {len(members)} pass")
    if options.table:
        options.table.write_text(make_table(*read_rows(options.rows)))
        print(options.table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
