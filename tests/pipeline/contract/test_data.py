from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.contract import data as module
from pipeline.contract.data import (
    PackedRows,
    Samples,
    as_task_outputs,
    check_call,
    check_columns,
    cut_texts,
    fingerprint,
    forward,
    mask_between_texts,
    name_outputs,
    one_text_per_row,
    pack_texts,
    sample_digests,
)
from pipeline.contract.task import Task
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import digest_parts


class Items(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class Stream(IterableDataset[Any]):
    def __init__(self, *items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class Names:
    """A task with the attributes that `name_outputs` reads."""

    inputs = ("x",)

    def __init__(self, *outputs: str) -> None:
        self.outputs = outputs


def task(*outputs: str) -> Task:
    return Names(*outputs)  # type: ignore[return-value]


def test_columns_are_read_at_any_indices_in_the_order_requested() -> None:
    samples = Samples("train", {"x": np.arange(10), "y": np.arange(10) * 2.0})
    batch = samples.batch([7, 0, 7])
    assert batch["x"].tolist() == [7, 0, 7]
    assert batch["y"].tolist() == [14.0, 0.0, 14.0]
    assert samples.in_memory


def test_dataset_of_items_gives_the_batches_of_its_columns() -> None:
    columns: dict[str, Any] = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "label": np.arange(4)}
    items = Items(*({name: column[i] for name, column in columns.items()} for i in range(4)))
    left, right = Samples("test", columns), Samples("test", items)
    assert not right.in_memory
    for indices in ([0, 3, 1], range(4)):
        for name, column in left.batch(indices).items():
            assert torch.equal(column, right.batch(indices)[name])
            assert column.dtype == right.batch(indices)[name].dtype


def test_batches_cover_a_range_in_order_with_a_smaller_last_one() -> None:
    samples = Samples("test", {"x": np.arange(10)})
    assert [batch["x"].tolist() for batch in samples.batches(range(2, 9), 3)] == [[2, 3, 4], [5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"x": np.zeros(3), "y": np.zeros(2)}, r"columns differ in length \(x 3, y 2\)"),
        ({}, "has no columns"),
        (None, "columns of equal length, a map-style data set with a length, or a stream"),
        (5, "columns of equal length, a map-style data set with a length, or a stream"),
        (({"x": i} for i in range(3)), r"data\('train'\): a generator can be read only once"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Samples("train", source)


@pytest.mark.parametrize("source", [{"x": np.zeros((0, 4))}, Items(), Stream()])
def test_an_empty_split_is_refused_by_name(source: Any) -> None:
    with pytest.raises(DataError, match=r"data\('validation'\): the split is empty"):
        Samples("validation", source)


@pytest.mark.parametrize("column", [["a", "b"], 3, None, [[1, 2], [3]], np.array(["x", "y"])])
def test_a_column_that_is_no_array_of_numbers_is_named(column: Any) -> None:
    with pytest.raises(DataError, match=r"data\('train'\): column `bad`"):
        Samples("train", {"x": np.zeros(2), "bad": column})


class Source:
    """A stream that counts what it reads; with `lazy`, items are functions that load a sample."""

    def __init__(self, count: int = 10, lazy: bool = False) -> None:
        self.count, self.lazy, self.epoch = count, lazy, 0
        self.read: list[int] = []
        self.loaded: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            self.read.append(index)
            yield functools.partial(self.load, index) if self.lazy else self.load(index)

    def load(self, index: int) -> dict[str, int]:
        self.loaded.append(index)
        return {"x": index + 100 * self.epoch}


def values(samples: Samples, indices: Any, epoch: int = 0) -> list[int]:
    found: list[int] = samples.batch(indices, epoch)["x"].tolist()
    return found


def test_a_stream_is_counted_and_gives_samples_at_any_indices() -> None:
    samples = Samples("train", Source())
    assert (len(samples), samples.is_stream, samples.in_memory, samples.ends) == (10, True, False, [0, 1])
    assert values(samples, [7, 0, 7]) == [7, 0, 7]
    assert values(samples, range(8, 10)) == [8, 9]
    assert values(samples, range(3, 5), epoch=2) == [203, 204]
    assert fingerprint(samples) == fingerprint(Samples("train", {"x": np.arange(10)}))


def test_consecutive_batches_of_a_stream_read_it_once() -> None:
    source = Source()
    samples = Samples("train", source, count=10)
    assert [values(samples, range(i, i + 2)) for i in range(0, 10, 4)] == [[0, 1], [4, 5], [8, 9]]
    assert source.read == list(range(10))


def test_samples_of_a_stream_that_are_functions_are_loaded_only_when_used() -> None:
    source = Source(lazy=True)
    samples = Samples("train", source, count=10)
    assert values(samples, [3, 6]) == [3, 6]
    assert source.loaded == [3, 6]


def test_a_stream_that_can_begin_anywhere_reads_nothing_before() -> None:
    class Seekable(Source):
        def start_at(self, position: int) -> Iterator[Any]:
            return (self.load(index) for index in range(position, self.count))

    source = Seekable()
    assert values(Samples("train", source, count=10), [7, 8]) == [7, 8]
    assert (source.read, source.loaded) == ([], [7, 8])


def test_the_test_split_of_a_stream_is_read_once_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    samples = Samples("test", source, count=10)
    assert not samples.is_stream
    assert [values(samples, [9, 0]) for _ in range(3)] == [[9, 0]] * 3
    assert source.read == list(range(10))
    monkeypatch.setattr(module, "_MAX_TEST_BYTES", 100)
    with pytest.raises(DataError, match=r"data\('test'\): the stream has more than 0 GiB"):
        Samples("test", Source())


def test_a_stream_of_another_length_than_it_has_is_refused() -> None:
    class Short(Source):
        def __len__(self) -> int:
            return 12

    class Long(Source):
        def __len__(self) -> int:
            return 7

    with pytest.raises(DataError, match="the stream ended after 10 of 12 samples"):
        Samples("train", Short()).batch(range(8, 12))
    with pytest.raises(DataError, match="the stream has more samples than the 7 of its length"):
        Samples("train", Long()).batch(range(5, 7))
    assert values(Samples("train", Source()).first(7), range(5, 7)) == [5, 6]
    assert values(Samples("train", Long()).first(4), range(2, 4)) == [2, 3]


RAGGED: list[dict[str, Any]] = [{"ids": [3, 4, 5], "label": 0}, {"ids": [6], "label": 1}, {"ids": [7, 8], "label": 0}]


def pad(samples: Any) -> dict[str, Tensor]:
    rows = [torch.as_tensor(sample["ids"]) for sample in samples]
    return {
        "ids": nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "label": torch.tensor([sample["label"] for sample in samples]),
    }


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (RAGGED, "column `ids` has samples of lengths 3 and 1"),
        ([{"x": torch.zeros(3)}, {"x": torch.zeros(5)}], "column `x` has samples of lengths 3 and 5"),
        ([{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}], r"column `x` has samples of shapes \(2, 3\) and \(2, 4\)"),
        ([{"x": 1, "y": 1}, {"x": 1}], r"a sample has no column `y` \(its columns: x\)"),
    ],
)
def test_samples_of_unequal_shapes_are_a_one_line_error(items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\('train'\): {message}"):
        Samples("train", items).batch(range(len(items)))


def test_ragged_column_is_an_error_that_names_collate() -> None:
    for column in ([[1, 2], [3]], np.array([[1, 2], [3]], dtype=object), [np.zeros(2), np.zeros(1)]):
        with pytest.raises(DataError, match=r"column `ids` has samples of lengths 2 and 1.*collate\(samples\)"):
            Samples("train", {"ids": column})


@pytest.mark.parametrize("form", ["items", "columns", "stream"])
def test_collate_makes_the_batches_of_any_source(form: str) -> None:
    source: Any = RAGGED
    if form == "columns":
        source = {name: [sample[name] for sample in RAGGED] for name in RAGGED[0]}
    if form == "stream":
        source = Stream(*RAGGED)
    samples = Samples("train", source, pad)
    assert samples.batch([2, 0])["ids"].tolist() == [[7, 8, 0], [3, 4, 5]]
    assert samples.first(2).batch([1])["ids"].tolist() == [[6]]
    columns = samples.collated().columns
    assert columns is not None
    assert columns["ids"].tolist() == [[3, 4, 5], [6, 0, 0], [7, 8, 0]]
    alone = [digest_parts([digest]) for digest in sample_digests(samples, ["ids"])]
    assert alone == [digest_parts(sample_digests(Samples("x", [row], pad), ["ids"])) for row in RAGGED]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.zeros(3)], "must return a mapping of column names to tensors, not list"),
        ({"x": torch.zeros(2)}, r"column `x` must be a tensor with one row for each of 3 samples; found shape \(2,\)"),
        ({"x": [1, 2, 3]}, "column `x` must be a tensor .* found list"),
    ],
)
def test_a_collate_that_returns_something_else_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^collate\(\): {message}"):
        Samples("train", RAGGED, lambda _: batch).batch(range(3))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (3, "must be a mapping of column names"),
        ((torch.zeros(2), 1), "must be a mapping of column names"),
        ({"x": 1.0, "path": "a.png"}, "column `path`"),
    ],
)
def test_item_must_be_a_mapping_of_numbers(item: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Samples("train", Items(item, item)).batch([0, 1])


def test_input_without_a_column_is_named_with_the_existing_columns() -> None:
    with pytest.raises(DataError, match=r"no column x, which the task names as an input \(columns: image\)"):
        check_columns(task("y"), Samples("train", {"image": np.zeros(2)}))


def test_one_declared_output_reaches_the_loss_as_a_bare_tensor() -> None:
    found = forward(nn.Identity(), task("y"), {"x": torch.ones(2), "label": torch.zeros(2)})
    assert isinstance(found, Tensor)


@pytest.mark.parametrize("kind", [tuple, list, lambda values: Pair(*values)])
def test_several_outputs_take_the_declared_names_in_order(kind: Any) -> None:
    found = name_outputs(task("output", "state"), kind((torch.zeros(1), torch.ones(1))))
    assert {name: float(tensor) for name, tensor in found.items()} == {"output": 0.0, "state": 1.0}
    assert as_task_outputs(task("output", "state"), found) is found


def test_a_mapping_is_read_by_name_and_in_declared_order() -> None:
    found = name_outputs(task("a", "b"), {"b": torch.ones(1), "other": torch.ones(9), "a": torch.zeros(1)})
    assert list(found) == ["a", "b"]
    assert float(found["b"]) == 1.0


@dataclass
class Parts:
    """A dataclass that a model returns."""

    b: Any
    a: Any
    left_out: Any = None


class Pair(NamedTuple):
    b: Any
    a: Any


@pytest.mark.parametrize("kind", [Parts, Pair])
def test_dataclasses_and_named_tuples_are_read_by_name(kind: Any) -> None:
    found = name_outputs(task("a", "b"), kind(b=torch.ones(1), a=torch.zeros(1)))
    assert {name: float(tensor) for name, tensor in found.items()} == {"a": 0.0, "b": 1.0}
    inner = name_outputs(task("heads.a", "loss"), {"heads": kind(b=None, a=torch.zeros(1)), "loss": torch.ones(1)})
    assert list(inner) == ["heads.a", "loss"]


@pytest.mark.parametrize(
    ("returned", "description"),
    [
        ((torch.zeros(2, 3), (torch.zeros(1), torch.zeros(1)), 1, 2, 3), "a tuple of 5 (a tensor of shape [2, 3], a"),
        ({"x": 1, "y": 2}, "a dict with x, y;"),
        (Parts(1, 2), "a Parts with b, a, left_out;"),
        (None, "it returned None;"),
    ],
)
def test_an_error_about_outputs_describes_what_the_model_returned(returned: Any, description: str) -> None:
    with pytest.raises(DataError) as caught:
        name_outputs(task("a", "b"), returned)
    assert description in str(caught.value)


class ByKeyword(nn.Module):
    def forward(self, *, x: Tensor) -> Tensor:
        return x


class OfTwo(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


@pytest.mark.parametrize("net", [ByKeyword(), OfTwo()])
def test_forward_that_does_not_accept_the_inputs_is_refused(net: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"called with `inputs` in order \(x\), but its forward\(.*does not take"):
        forward(net, task("y"), {"x": torch.ones(2)})


def test_inputs_in_another_order_than_forwards_arguments_are_refused() -> None:
    swapped: Any = SimpleNamespace(inputs=("mask", "x"))
    with pytest.raises(ConfigError, match=r"in order \(mask, x\), but its forward\(.*has them in another order"):
        check_call(swapped, OfTwo())
    for names in (("x", "mask"), ("a", "b"), ("b", "x")):
        check_call(cast("Any", SimpleNamespace(inputs=names)), OfTwo())


def test_exception_inside_the_model_is_not_wrapped() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        forward(Broken(), task("y"), {"x": torch.ones(2)})


@pytest.mark.parametrize(
    "returned",
    [torch.zeros(1), (torch.zeros(1),), (torch.zeros(1), None), {"a": torch.zeros(1)}, (torch.zeros(1),) * 3, None, 3],
)
def test_outputs_other_than_declared_are_refused(returned: Any) -> None:
    with pytest.raises(DataError, match=r"named in `outputs` \(a, b\)"):
        name_outputs(task("a", "b"), returned)


def test_split_can_be_limited_to_its_first_samples() -> None:
    columns = Samples("train", {"x": np.arange(5)})
    items = Samples("train", Items(*({"x": i} for i in range(5))))
    for samples in (columns, items):
        cut_texts = samples.first(3)
        assert (len(cut_texts), cut_texts.in_memory) == (3, samples.in_memory)
        assert cut_texts.batch([2, 0])["x"].tolist() == [2, 0]
        assert samples.first(0) is samples
        assert samples.first(9) is samples


def columns() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {"x": generator.normal(size=(20, 3)).astype(np.float32), "label": generator.integers(0, 5, 20)}


def of(source: Any) -> str:
    return fingerprint(Samples("train", source))


@pytest.mark.parametrize("size", [1, 7, 20])
def test_equal_data_have_equal_fingerprints_from_any_source(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The split, the order of columns, their kind, and how much is read at a time do not count."""
    data = columns()
    expected = of(data)
    monkeypatch.setattr(module, "_BATCH", size)
    assert fingerprint(Samples("test", dict(reversed(data.items())))) == of(data) == expected
    assert of([{name: column[i] for name, column in data.items()} for i in range(20)]) == expected


def test_fingerprint_depends_on_every_bit_label_and_the_order() -> None:
    flipped, relabelled = columns(), columns()
    flipped["x"].view(np.uint8)[7, 2] ^= 1
    relabelled["label"][19] += 1
    reordered = {name: column[::-1].copy() for name, column in columns().items()}
    assert len({of(data) for data in (columns(), flipped, relabelled, reordered)}) == 4


def test_fingerprint_depends_on_type_shape_and_name() -> None:
    zeros = np.zeros((4, 6), np.float32)
    found = {
        of(source)
        for source in (
            {"x": zeros},
            {"y": zeros},
            {"x": zeros.view(np.int32)},
            {"x": zeros.reshape(4, 2, 3)},
            {"x": zeros[:3]},
        )
    }
    assert len(found) == 5


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_every_type_of_number_has_a_fingerprint(kind: torch.dtype) -> None:
    assert of({"x": torch.tensor([0, 1]).to(kind)}) != of({"x": torch.tensor([1, 1]).to(kind)})


def test_duplicates_are_found_by_the_named_columns() -> None:
    samples = Samples("train", {"x": np.array([[1, 2], [3, 4], [1, 2]]), "label": np.array([0, 1, 1])})
    first, second, third = sample_digests(samples, ["x"])
    assert first == third != second
    assert len(set(sample_digests(samples, ["x", "label"]))) == 3


PLAIN = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
PLAIN |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
EXPERTS |= {"n_group": 1, "topk_group": 1}
MODELS: Mapping[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, **EXPERTS, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, **EXPERTS, "num_mtp_layers": 0},
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
}


def causal_model(kind: str) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **PLAIN, **MODELS[kind]))
    return model


def lengths(seed: int) -> list[int]:
    """Return lengths of texts: many short, few long."""
    draw = random.Random(seed)
    return [min(2 + int(draw.expovariate(1 / 12)), 40) for _ in range(300)]


def ids_of(*sizes: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(1, 64, size).tolist() for size in sizes]


def fed(rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(rows.ids), torch.from_numpy(rows.segments), torch.from_numpy(rows.positions)


@pytest.mark.parametrize("seed", range(3))
def test_every_text_is_in_exactly_one_packed_row(seed: int) -> None:
    texts = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths(seed), 1)]
    rows = pack_texts(texts, 40, pad=7)
    found = []
    for ids, segments, positions in zip(rows.ids, rows.segments, rows.positions, strict=True):
        assert (np.diff(segments) >= 0).all(), "padding on the left, then the texts in order"
        assert (ids[segments == 0] == 7).all()
        for number in range(1, segments.max() + 1):
            own = segments == number
            assert positions[own].tolist() == list(range(own.sum()))
            found.append(ids[own].tolist())
    assert sorted(found) == texts


def test_packing_leaves_little_padding() -> None:
    texts = [[1] * length for length in lengths(0)]
    assert one_text_per_row(texts, 40, pad=0).padding > 0.6
    assert pack_texts(texts, 40, pad=0).padding < 0.02


def test_text_goes_into_the_first_row_with_room_or_is_refused() -> None:
    rows = pack_texts([[1] * 6, [2] * 5, [3] * 4, [4] * 5, [5] * 10], 10, pad=0)
    assert [sorted(set(row.tolist())) for row in rows.ids] == [[1, 3], [2, 4], [5]]
    for lay_out in (pack_texts, one_text_per_row):
        with pytest.raises(DataError, match="a text of 11 tokens is longer than a row of 10"):
            lay_out([[1] * 11], 10, pad=0)


def test_long_text_is_cut_and_a_last_single_token_dropped() -> None:
    assert cut_texts([list(range(9)), [1], []], 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_packed_text_has_the_logits_of_the_text_alone(name: str) -> None:
    """The masks and caches that models use by default would both mix texts."""
    torch.manual_seed(0)
    model = causal_model(name).eval()
    texts = ids_of(5, 9, 1, 14, 3, 2)
    alone = [model(torch.tensor([text])).logits[0] for text in texts]  # with transformers' own masks and positions
    mask_between_texts(model)
    packed = pack_texts([*texts, *ids_of(30, 8)], 48, pad=0)
    assert packed.ids.shape == (2, 48) and packed.segments[0].max() > 5 and packed.padding
    ids, segments, positions = fed(packed)
    together = model(ids, segments, positions).logits
    rows = model(*fed(one_text_per_row(texts, 15, pad=0))).logits
    for number, (text, expected, row) in enumerate(zip(texts, alone, rows, strict=True), 1):
        own = segments[0] == number
        assert ids[0][own].tolist() == text
        torch.testing.assert_close(together[0][own], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(row[-len(text) :], expected, rtol=1e-4, atol=1e-5)


def test_gradients_do_not_cross_texts() -> None:
    model = mask_between_texts(causal_model("llama"))
    ids, segments, positions = fed(pack_texts(ids_of(6, 7), 16, pad=0))
    embedded = model.get_submodule("model.embed_tokens")(ids).detach().requires_grad_()
    found = model(inputs_embeds=embedded, attention_mask=segments, position_ids=positions).logits
    found[segments == 2].square().sum().backward()
    assert embedded.grad is not None
    assert (embedded.grad[segments == 2] != 0).any() and not embedded.grad[segments != 2].any()


@torch.no_grad()
def test_decoding_with_a_cache_is_not_masked() -> None:
    model = mask_between_texts(causal_model("llama")).eval()
    (ids,) = ids_of(8)
    whole = model(torch.tensor([ids]), position_ids=torch.arange(8)[None]).logits
    plain = causal_model("llama").eval()
    plain.load_state_dict(model.state_dict())
    cache = plain(torch.tensor([ids[:7]])).past_key_values
    step = model(torch.tensor([ids[7:]]), torch.ones(1, 8), torch.tensor([[7]]), past_key_values=cache)
    torch.testing.assert_close(step.logits[0, 0], whole[0, 7], rtol=1e-4, atol=1e-5)


def test_model_that_cannot_separate_packed_texts_is_refused() -> None:
    model = mask_between_texts(causal_model("llama"))
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(DataError, match="no position_ids"):
        model(ids)
    model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="attention by 'flash_attention_2' does not keep the texts of a row apart"):
        model(ids, None, ids)
