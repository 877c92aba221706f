"""Every process must see the same data: compared before the first step, since later it would be wrong in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.spec.data import Samples, check_columns
from pipeline.spec.digest import digest_parts
from pipeline.spec.errors import DataError
from pipeline.spec.fingerprint import sample_digests
from pipeline.spec.task import Task
from train.group import Group

_LOOKED_AT = 64  # rows of data in memory whose values are compared


def check_splits(task: Task, splits: Sequence[Samples], group: Group) -> None:
    """The splits are the same everywhere, have what the task names, and a sample for every copy of the model."""
    for samples in splits:
        if difference := disagreement(group.gather(describe(samples))):
            raise DataError(
                f"data({samples.split!r}) differs between processes: {difference}; "
                "it must give the same samples in every process"
            )
        check_columns(task, samples)
        if len(samples) < group.data_size:
            raise DataError(
                f"data({samples.split!r}): {len(samples)} samples for {group.data_size} "
                f"{'processes' if group.model_size == 1 else 'copies of the model'}; lower train.processes"
            )


def describe(samples: Samples) -> dict[str, str]:
    """What can be compared at the price of a few samples."""
    facts = {"its length": str(len(samples))}
    first, last = samples.batch([0]), samples.batch([len(samples) - 1])
    for name in first.keys() | last.keys():
        ends = [
            f"{tuple(end[name].shape[1:])} {end[name].dtype}" if name in end else "missing" for end in (first, last)
        ]
        facts[f"column {name}"] = ends[0] if ends[0] == ends[1] else f"{ends[0]} at first, {ends[1]} at last"
    if samples.in_memory:  # items of a data set may be drawn anew each time they are asked for
        rows = sorted({*(len(samples) * i // _LOOKED_AT for i in range(_LOOKED_AT)), len(samples) - 1})
        chosen = Samples(samples.split, samples.batch(rows))
        facts |= {f"what is in column {name}": digest_parts(sample_digests(chosen, [name]))[:8] for name in first}
    return facts


def disagreement(found: Sequence[Mapping[str, str]]) -> str:
    """The first fact that is not the same for all ranks, with the ranks that hold each value; else nothing."""
    for fact in sorted(set().union(*found)):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(found):
            values.setdefault(facts.get(fact, "missing"), []).append(rank)
        if len(values) > 1:
            told = [f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items()]
            return f"{fact} is {' and '.join(told)}"
    return ""
