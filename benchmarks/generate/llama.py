"""`python llama.py FOLDER THREADS`: the loop of llama.cpp, in an environment that has only its packages.

It writes the weights as GGUF in float32, and keeps keys and values in float32 as well.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main(folder: Path, threads: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model.gguf"
    _write(folder, config, path)
    llama_cpp.llama_backend_init()
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    contexts: dict[int, Any] = {}
    for line in sys.stdin:
        lap = json.loads(line)
        prompts, rows = lap["prompts"], len(lap["prompts"])
        context = contexts.get(rows) or contexts.setdefault(rows, _context(model, rows, threads))
        started, cpu = time.perf_counter(), time.process_time()
        answers = _generate(context, prompts, lap["tokens"], config["vocab_size"])
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        print(json.dumps({"seconds": seconds, "cpu": cpu_seconds, "answers": answers}), flush=True)


def _context(model: Any, rows: int, threads: int) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_seq_max = 256 * rows, 256 * rows, rows
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.type_k = parameters.type_v = 0  # float32
    return llama_cpp.llama_init_from_model(model, parameters)


def _generate(context: Any, prompts: list[list[int]], tokens: int, vocabulary: int) -> list[list[int]]:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(sum(map(len, prompts)), 0, 1)
    answers: list[list[int]] = [[] for _ in prompts]
    new, start = prompts, 0
    for _ in range(tokens):
        count = len(new[0])
        batch.n_tokens = count * len(new)
        for row, ids in enumerate(new):
            for column, token in enumerate(ids):
                index = row * count + column
                batch.token[index], batch.pos[index] = token, start + column
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = column == count - 1
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama.cpp cannot run the batch")
        for row, answer in enumerate(answers):
            logits = llama_cpp.llama_get_logits_ith(context, (row + 1) * count - 1)
            answer.append(int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax()))
        start += count
        new = [answer[-1:] for answer in answers]
    llama_cpp.llama_batch_free(batch)
    return answers


def _write(folder: Path, config: dict[str, Any], path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")
    with np.load(folder / "weights.npz") as weights:
        for name in weights.files:
            writer.add_tensor(_gguf_name(name), weights[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _OTHER:
        return f"{_OTHER[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
