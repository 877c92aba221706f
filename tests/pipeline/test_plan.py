from __future__ import annotations

from collections.abc import Mapping

import pytest

from pipeline.plan import SCHEMA, Step, choose, config_parts, decide, explain, input_parts, with_upstream
from pipeline.spec.config import Config, override_config, parse_config
from pipeline.spec.digest import digest_mapping
from pipeline.spec.errors import ConfigError
from pipeline.spec.run import STEPS, StepRecord

PARTS = {"config:train.lr": "0.004", "source:task.py": "a" * 64, "input:prepare/data.json": "b" * 64}


@pytest.fixture
def config() -> Config:
    return parse_config({"name": "m", "task": "task.py:T", "codec": "codec.py:C"}, "test")


def done(parts: Mapping[str, str], status: str = "done", reused_from: str = "") -> StepRecord:
    key = digest_mapping({**parts, "schema": SCHEMA})
    return StepRecord.model_validate(
        {"step": "train", "status": status, "key": key, "parts": parts, "reused_from": reused_from}
    )


def decided(
    parts: Mapping[str, str], *past: tuple[str, StepRecord], forced: bool = False, damaged: tuple[str, ...] = ()
) -> Step:
    return decide("train", parts, past, forced, lambda run, record: list(damaged))


def test_no_name_or_all_means_every_step() -> None:
    assert choose([], None, None) == choose(["all"], None, None) == STEPS


def test_steps_come_in_the_order_of_the_road_whatever_the_order_of_words() -> None:
    assert choose(["export", "prepare"], None, None) == ("prepare", "export")


def test_from_and_until_cut_the_road() -> None:
    assert choose([], "train", "export") == ("train", "evaluate", "export")


@pytest.mark.parametrize("words", [(["trian"], None, None), ([], "trian", None), ([], None, "trian")])
def test_an_unknown_step_is_told_with_the_known_ones(words: tuple[list[str], str | None, str | None]) -> None:
    with pytest.raises(ConfigError, match="no step 'trian'; there are prepare, train, "):
        choose(*words)


def test_options_that_leave_nothing_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="leave no step"):
        choose(["prepare"], "train", None)


def test_a_step_brings_along_all_it_reads_from() -> None:
    assert with_upstream(["evaluate"]) == ("prepare", "train", "evaluate")
    assert with_upstream(["package"]) == ("prepare", "train", "evaluate", "export", "package")
    assert with_upstream(["prepare"]) == ("prepare",)


def test_a_step_depends_on_its_own_settings_alone(config: Config) -> None:
    other = override_config(config, ["evaluate.margin=0.3"])
    assert config_parts("train", config) == config_parts("train", other)
    assert config_parts("evaluate", config) != config_parts("evaluate", other)


def test_where_the_service_runs_changes_no_step_before_it(config: Config) -> None:
    other = override_config(config, ["deploy.port=9000"])
    assert {step for step in STEPS if config_parts(step, config) != config_parts(step, other)} == {"deploy"}


def test_an_input_that_does_not_exist_yet_is_unknown() -> None:
    assert input_parts("train", {}) == {"input:prepare/data.json": "?"}
    assert input_parts("train", {"prepare": {"data.json": "abc"}}) == {"input:prepare/data.json": "abc"}


def test_an_equal_key_is_reused_and_the_run_that_made_it_is_named() -> None:
    step = decided(PARTS, ("second", done(PARTS, reused_from="first")), ("first", done(PARTS)))
    assert (step.action, step.source, step.reason) == ("reuse", "second", "unchanged since first")


def test_an_older_run_with_the_same_key_is_found_behind_a_newer_one() -> None:
    other = {**PARTS, "config:train.lr": "0.1"}
    assert decided(PARTS, ("new", done(other)), ("old", done(PARTS))).source == "old"


@pytest.mark.parametrize("status", ["running", "failed", "interrupted", "rejected"])
def test_only_what_was_completed_is_reused(status: str) -> None:
    step = decided(PARTS, ("first", done(PARTS, status=status)))
    assert (step.action, step.reason) == ("run", "never completed")


def test_a_forced_step_runs_though_nothing_changed() -> None:
    assert decided(PARTS, ("first", done(PARTS)), forced=True).reason == "forced"


def test_a_step_whose_input_is_unknown_waits_for_the_step_before() -> None:
    step = decided({**PARTS, "input:prepare/data.json": "?"}, ("first", done(PARTS)))
    assert (step.action, step.reason) == ("run", "after prepare")


def test_damaged_outputs_are_not_reused() -> None:
    step = decided(PARTS, ("first", done(PARTS)), damaged=("model.safetensors", "summary.json"))
    assert step.action == "run"
    assert step.reason == "the output train/model.safetensors and 1 more of run first changed on disk"


def test_deploy_always_looks_at_what_is_live() -> None:
    step = decide("deploy", PARTS, [("first", done(PARTS))], False, lambda run, record: [])
    assert (step.action, step.reason) == ("run", "looks at what is live, always")


def test_the_key_covers_every_part() -> None:
    key = decided(PARTS).key
    assert len({key} | {decided({**PARTS, name: "other"}).key for name in PARTS}) == 1 + len(PARTS)


def test_a_changed_setting_is_told_with_both_values() -> None:
    past = [("first", done(PARTS))]
    assert explain({**PARTS, "config:train.lr": "0.05"}, past) == "train.lr 0.004 → 0.05"
    assert explain({**PARTS, "version:torch": "2.13.0"}, past) == "torch absent → 2.13.0"


def test_a_changed_file_is_named_and_our_own_told_from_the_users() -> None:
    past = [("first", done({**PARTS, "house:train/order.py": "c"}))]
    assert explain({**PARTS, "source:task.py": "d", "house:train/order.py": "c"}, past) == "task.py changed"
    assert explain({**PARTS, "house:train/order.py": "d"}, past) == "pipe’s own train/order.py changed"


def test_another_champion_to_compare_data_with_is_told_where_nothing_else_is_news() -> None:
    past = [("first", done({**PARTS, "rival:champion": "none"}))]
    assert explain({**PARTS, "rival:champion": "b"}, past) == "champion changed"
    assert explain({**PARTS, "rival:champion": "b", "source:task.py": "d"}, past) == "task.py changed"


def test_files_that_came_and_went_are_told_so() -> None:
    past = [("first", done({**PARTS, "source:old.py": "c"}))]
    assert explain({**PARTS, "source:new.py": "c"}, past) == "new.py is new, old.py is gone"


def test_what_the_user_touched_comes_first_and_its_consequences_last() -> None:
    before = {"input:prepare/data.json": "1", "version:torch": "2", "source:task.py": "3", "config:train.lr": "0.1"}
    after = dict.fromkeys(before, "9")
    assert explain(after, [("first", done(before))]) == "train.lr 0.1 → 9, task.py changed, torch 2 → 9 and 1 more"


def test_a_step_is_compared_with_its_last_completion_not_its_last_failure() -> None:
    past = [("second", done({**PARTS, "config:train.lr": "9"}, status="failed")), ("first", done(PARTS))]
    assert explain({**PARTS, "config:train.lr": "0.05"}, past) == "train.lr 0.004 → 0.05"


def test_a_step_without_a_past_never_ran() -> None:
    assert explain(PARTS, []) == "never run"
