"""`python -m benchmarks.generate.loops NAME FOLDER THREADS`: one contender in a process of its own.

It reads laps as lines of JSON, and answers each with its seconds, its CPU seconds and the tokens.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

Prompts = list[list[int]]
Loop = Callable[
    [Prompts, int], list[list[int]]
]  # returns that many more tokens of each prompt, the likeliest each time


def main(argv: Sequence[str]) -> None:
    name, folder, threads = argv
    loop = LOOPS[name](Path(folder), int(threads))
    for line in sys.stdin:
        lap = json.loads(line)
        started, cpu = time.perf_counter(), time.process_time()
        answers = loop(lap["prompts"], lap["tokens"])
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        print(json.dumps({"seconds": seconds, "cpu": cpu_seconds, "answers": answers}), flush=True)


def engine(form: str, folder: Path, _threads: int) -> Loop:
    """Return the service's engine, without HTTP and tokenizer; each prompt is a request."""
    from serve.llm.engine import Engine, EngineLimits
    from serve.llm.sampling import Sampling
    from serve.llm.sequence import GenerationOptions, SequenceGroup, TextSequence

    graph, pool = _graph(form, folder), ThreadPoolExecutor(1)
    limits = EngineLimits(sequences=64, waiting=64, cache_bytes=1 << 30)

    async def generate(runner: Engine, prompt: list[int], tokens: int) -> list[int]:
        group = SequenceGroup(GenerationOptions(tokens, Sampling(temperature=0)), buffered=True)
        sequence = TextSequence(group, 0, prompt, (), lambda ids: "w" * len(ids))
        async for _ in runner.generate([sequence]):
            pass
        return sequence.tokens[len(prompt) :]

    async def together(runner: Engine, prompts: Prompts, tokens: int) -> list[list[int]]:
        answers = await asyncio.gather(*(generate(runner, prompt, tokens) for prompt in prompts))
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})  # the engine's own ends now
        return answers

    event_loop, runner = asyncio.new_event_loop(), Engine(graph, limits, pool)
    return lambda prompts, tokens: event_loop.run_until_complete(together(runner, prompts, tokens))


def bare(form: str, folder: Path, _threads: int) -> Loop:
    """Return the plainest loop over the service's graph: one run for the prompts, then one for each token."""
    graph = _graph(form, folder)

    def loop(prompts: Prompts, tokens: int) -> list[list[int]]:
        logits, cache = graph.run(graph.empty_cache([0] * len(prompts)), np.array(prompts))
        chosen = [logits[:, -1].argmax(axis=1)]
        while len(chosen) < tokens:
            logits, cache = graph.run(cache, chosen[-1][:, None])
            chosen.append(logits[:, -1].argmax(axis=1))
        return np.array(chosen).T.tolist()  # type: ignore[no-any-return]

    return loop


def _graph(form: str, folder: Path) -> Any:
    from pipeline.contract.bundle import open_bundle
    from serve.llm.kv_cache import DecoderGraph
    from serve.runtime.session import Session

    bundle = open_bundle(folder / form)
    return DecoderGraph(Session(bundle), bundle.signature)


def transformers(folder: Path, threads: int) -> Loop:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "transformers", dtype=torch.float32)

    @torch.inference_mode()
    def loop(prompts: Prompts, tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        answers = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return answers[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    return loop


def genai(folder: Path, _threads: int) -> Loop:
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(folder / "formats" / "genai"))

    def loop(prompts: Prompts, tokens: int) -> list[list[int]]:
        parameters, length = onnxruntime_genai.GeneratorParams(model), len(prompts[0])
        parameters.set_search_options(do_sample=False, max_length=length + tokens, batch_size=len(prompts))
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(np.array(prompts, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [generator.get_sequence(row)[length:].tolist() for row in range(len(prompts))]

    return loop


LOOPS: dict[str, Callable[[Path, int], Loop]] = {
    "pipe": functools.partial(engine, "plain"),
    "pipe, optimize: transformers": functools.partial(engine, "fused"),
    "bare loop, optimize: transformers": functools.partial(bare, "fused"),
    "onnxruntime-genai": genai,
    "transformers": transformers,
}

if __name__ == "__main__":
    main(sys.argv[1:])
