"""`model.pretrained`: files of a folder or hub id, refused folders, and the selected run of another project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.contract.config import parse_config
from pipeline.contract.pretrained import (
    WEIGHT_FILE,
    WEIGHT_INDEX,
    commit_of,
    hub_id,
    locate_pretrained,
    open_pretrained,
    record,
)
from pipeline.contract.run import Run, StepRecord
from pipeline.contract.settings.stages import Model
from pipeline.history import write_record
from pipeline.system.errors import ConfigError, DataError, PipelineError, ResourceError
from pipeline.system.files import digest_bytes

from ..records import write_run_file

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "weights")


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("# Weights")
    for name in SHARDS:
        (folder / name).write_bytes(b"some")
    index(folder, {"a.weight": SHARDS[0], "b.weight": SHARDS[1], "c.weight": SHARDS[1]})
    return folder


def index(folder: Path, weight_map: object) -> None:
    (folder / WEIGHT_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_only_small_files_and_shards_of_the_index_are_used(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"the same in another layout")
    found = open_pretrained(folder)
    assert sorted(found.small) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(found.weights) == list(SHARDS)


def test_single_file_has_no_description(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    (tmp_path / "net.safetensors").touch()
    found = open_pretrained(tmp_path / "net.safetensors")
    assert (found.small, list(found.weights), found.config(), found.is_run) == ({}, ["net.safetensors"], {}, False)
    with pytest.raises(ConfigError, match="no file"):
        open_pretrained(tmp_path / "other.safetensors")


def test_folder_of_a_run_gives_its_trained_weights(tmp_path: Path, folder: Path) -> None:
    run = tmp_path / "run"
    (run / "train").mkdir(parents=True)
    (run / "train" / WEIGHT_FILE).write_bytes(b"some")
    (run / "run.json").write_text("{}")
    (run / "prepare").mkdir()
    folder.rename(run / "prepare" / "files")
    found = open_pretrained(run)
    assert found.weights == {WEIGHT_FILE: run / "train" / WEIGHT_FILE}
    assert found.small["config.json"] == run / "prepare" / "files" / "config.json"


def refused(folder: Path, kind: type[PipelineError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        open_pretrained(folder)
    return str(caught.value)


def test_missing_shard_is_named_with_its_weights(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    assert f"{SHARDS[1]} is missing, which has b.weight and 1 more weights; to fix it: fetch" in refused(folder)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/other.safetensors", "a/../../b.safetensors", "evil.bin"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder.parent / "other.safetensors").write_bytes(b"some")
    index(folder, {"a.weight": SHARDS[0], "b.weight": name})
    assert f"names '{name}', which is no safetensors file inside the folder" in refused(folder)


@pytest.mark.parametrize("name", [SHARDS[0], "config.json", "tokenizer.json"])
def test_a_link_that_leads_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to(outside)
    assert f"{name}: a link to {outside}, outside the folder" in refused(folder)


def test_link_within_the_folder_is_accepted(folder: Path) -> None:
    (folder / SHARDS[0]).rename(folder / "first")
    (folder / SHARDS[0]).symlink_to("first")
    assert SHARDS[0] in open_pretrained(folder).weights


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *((WEIGHT_INDEX, body) for body in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}')),
        (WEIGHT_INDEX, '{"weight_map": []}'),
        ("config.json", "{"),
        ("config.json", "[]"),
    ],
)
def test_invalid_index_or_config_is_refused(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(body)
    assert name in refused(folder)


def test_a_config_that_describes_no_model_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 16}')
    assert "has no model_type, so it does not describe a model of transformers" in refused(folder, ConfigError)


def test_a_pickle_is_refused_with_how_to_convert_it(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / WEIGHT_INDEX):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    received = refused(folder, ConfigError)
    assert "pytorch_model.bin: a pickle, which can run code" in received
    assert "torch.load('pytorch_model.bin', weights_only=True)" in received


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("config.json", "no config.json in"),
        ("*.safetensors*", f"neither {WEIGHT_FILE} nor {WEIGHT_INDEX}"),
        ("", "no folder"),
    ],
)
def test_missing_folder_config_or_weights_are_refused(folder: Path, gone: str, message: str) -> None:
    for path in folder.glob(gone) if gone else ():
        path.unlink()
    assert message in refused(folder if gone else folder / "none", ConfigError)


def test_an_adapter_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/tiny"}')
    assert "holds an adapter, not a whole model; to fix it: name its base model" in refused(tmp_path, ConfigError)


def test_pretrained_is_a_hub_id_unless_the_folder_exists(tmp_path: Path, folder: Path) -> None:
    assert hub_id(Model(pretrained="deepseek-ai/DeepSeek-V2-Lite"), tmp_path) == ("deepseek-ai/DeepSeek-V2-Lite", "")
    assert hub_id(Model(pretrained="org/tiny@refs/pr/1"), tmp_path) == ("org/tiny", "refs/pr/1")
    write(tmp_path / "deepseek-ai" / "DeepSeek-V2-Lite")
    assert hub_id(Model(pretrained="deepseek-ai/DeepSeek-V2-Lite"), tmp_path) == ("", "")
    for word in ("weights", "./weights", "../a/weights", str(folder), "a/b/c"):
        assert hub_id(Model(pretrained=word), tmp_path) == ("", "")
    assert locate_pretrained(Model(pretrained="weights"), tmp_path) == folder
    assert locate_pretrained(Model(pretrained=str(folder)), Path("/elsewhere")) == folder


def test_allow_mismatch_without_pretrained_is_refused() -> None:
    model = {"allow_mismatch": ["score.*"]}
    with pytest.raises(ConfigError, match=r"has no effect without `pretrained`"):
        parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "model": model}, source="test")


COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, offline: a snapshot whose files are links to blobs."""
    repository = tmp_path / "hub" / "models--org--tiny"
    plain = write(tmp_path / "plain")
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    for directory in (snapshot, blobs, repository / "refs"):
        directory.mkdir(parents=True)
    for number, path in enumerate(sorted(plain.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (repository / "refs" / "main").write_text(COMMIT)
    import huggingface_hub
    from huggingface_hub import constants

    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **words: real(*args, cache_dir=tmp_path / "hub", **words)
    )
    return snapshot


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_an_id_is_read_from_the_hubs_cache(cache: Path, tmp_path: Path, revision: str) -> None:
    found = open_pretrained(locate_pretrained(Model(pretrained=f"org/tiny{revision}"), tmp_path))
    assert found.folder == cache
    assert sorted(found.weights) == list(SHARDS)
    assert commit_of(found.folder) == COMMIT


def test_training_uses_the_commit_of_prepare(cache: Path, tmp_path: Path) -> None:
    (cache.parents[1] / "refs" / "main").write_text("f" * 40)
    assert locate_pretrained(Model(pretrained="org/tiny"), tmp_path, COMMIT, SHARDS) == cache
    (cache / "config.json").unlink()
    assert locate_pretrained(Model(pretrained="org/tiny"), tmp_path, COMMIT, ["config.json"]) == cache, (
        "downloaded again"
    )


def test_unavailable_id_advises_to_download_into_a_folder(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as caught:
        locate_pretrained(Model(pretrained="org/other"), tmp_path)
    assert "no such folder in the project, and Hugging Face has no files of it" in str(caught.value)
    assert "into a folder, and name it in model.pretrained" in str(caught.value)
    with pytest.raises(ResourceError, match="has no v2 of it"):
        locate_pretrained(Model(pretrained="org/tiny@v2"), tmp_path)


def test_link_out_of_the_hub_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "stranger").write_bytes(b"some")
    (cache / SHARDS[0]).unlink()
    (cache / SHARDS[0]).symlink_to(tmp_path / "stranger")
    assert "outside the folder" in refused(cache)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    (folder / "runs").mkdir(parents=True)
    (folder / "pipe.yaml").write_text("name: other\n")
    return folder


@pytest.fixture
def root(tmp_path: Path, other: Path) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


def walked(project: Path, second: int, verdict: str = "pass", **statuses: str) -> Run:
    run = Run(project / "runs" / f"20260131-2359{second:02d}-0a1b")
    (run.output("prepare") / "files").mkdir(parents=True)
    (run.output("prepare") / "files" / "config.json").write_text('{"model_type": "llama"}')
    for step in ("train", "evaluate"):
        run.output(step).mkdir()
    weights = f"of {run.id}".encode()
    (run.output("train") / WEIGHT_FILE).write_bytes(weights)
    (run.output("evaluate") / "verdict.json").write_text(json.dumps({"verdict": verdict}))
    write_run_file(run, "train")
    outputs = {"train": {WEIGHT_FILE: digest_bytes(weights)}}
    for step, status in {"prepare": "done", "train": "done", "evaluate": "done", **statuses}.items():
        values = {"step": step, "status": status, "key": "k", "parts": {}, "outputs": outputs.get(step, {})}
        if status:
            write_record(run, StepRecord.model_validate(values))
    return run


def found(root: Path, **taken: str) -> Path:
    return locate_pretrained(Model(pretrained="../other"), root, **taken).resolve()


def test_newest_run_that_passed_the_gate_is_used(root: Path, other: Path) -> None:
    walked(other, 1)
    good = walked(other, 2)
    walked(other, 3, verdict="forced")
    walked(other, 4, verdict="fail", evaluate="rejected")
    walked(other, 5, train="running", evaluate="")
    assert found(root) == good.path
    better = walked(other, 6, verdict="no-baseline")
    assert found(root) == better.path


def test_training_uses_the_run_of_prepare_despite_a_newer_one(root: Path, other: Path) -> None:
    first, newer = walked(other, 1), walked(other, 2)
    assert found(root, run=first.id) == first.path
    assert found(root, run="20250101-000000-gone") == newer.path, "if that run is gone, the newest is used"


@pytest.mark.parametrize(
    ("state", "output"),
    [
        (None, "the project has no runs, so there are no weights to start from"),
        ({"train": "interrupted", "evaluate": ""}, "(the newest, 20260131-235901-0a1b: train interrupted)"),
        ({"evaluate": ""}, "(the newest, 20260131-235901-0a1b: evaluate never run)"),
        ({"verdict": "forced"}, "none of its 1 runs is trained and passed its gate"),
    ],
)
def test_error_without_such_a_run_states_how_to_make_one(
    root: Path, other: Path, state: dict[str, str] | None, output: str
) -> None:
    if state is not None:
        walked(other, 1, **state)
    with pytest.raises(ConfigError) as caught:
        found(root)
    assert output in str(caught.value)
    assert str(caught.value).endswith("; to fix it: `cd ../other && pipe run all` first")


def test_missing_verdict_does_not_count_as_passed(root: Path, other: Path) -> None:
    run = walked(other, 1)
    (run.output("evaluate") / "verdict.json").unlink()
    with pytest.raises(ConfigError, match="has no evaluation yet"):
        found(root)


def test_prepare_records_the_run_and_refuses_changed_weights(root: Path, other: Path) -> None:
    run = walked(other, 1)
    record(open_pretrained(found(root)), root)
    received = json.loads((root / "pretrained.json").read_text())
    assert received["run"] == run.id
    assert received["files"][WEIGHT_FILE]["sha256"] == run.read().steps["train"].outputs[WEIGHT_FILE]
    (run.output("train") / WEIGHT_FILE).write_bytes(b"others")
    with pytest.raises(DataError, match=rf"{WEIGHT_FILE}: changed since it was trained; run `pipe verify {run.id}`"):
        record(open_pretrained(found(root)), root)
