"""Identical samples, and copies of training samples that hashes miss: transformed pictures, and rows of a few numbers.

The latter two compare the distance to the nearest training sample with that to a further neighbor, so that dense
regions of the data raise no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.spatial import cKDTree  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional

from pipeline.data_checks.near_duplicates import Digests
from pipeline.data_checks.profile import Floats, Integers, as_floats

Matches: TypeAlias = tuple[Integers, Integers, Floats]  # test sample, training sample, ratio of distances

MIN_TRAINING_SAMPLES = 100
_MAX_PAIRS = 150_000_000  # of a test and a training picture that are compared
_PICTURE_NEIGHBOR = 20  # whose distance is the usual one
_PICTURE_RATIO = 0.18
_PICTURE_GAP = 4.0  # between copies and others; in drawings of a few parameters, distances grow without one
_WAVES = 8  # per axis; lowest frequencies of the cosine transform
_ANGLES = (-10.0, -7.5, -5.0, -2.5, 2.5, 5.0, 7.5, 10.0)
_MAX_SHIFT = 3  # pixels of the small picture
_ROW_NEIGHBOR = 10
_ROW_RATIO = 0.25
_TAIL = 0.1  # share of training rows with the smallest ratios
_HUGE = 1e150
_FALSE_ALARMS = 0.002  # expected among all test rows of clean data
_FEW_NUMBERS = 256  # per sample; where they take few values, equal samples are natural
_FEW_VALUES = 64  # of a number


def find_duplicates(digests: Mapping[str, Sequence[str] | Digests]) -> list[dict[str, Any]]:
    """Return every sample that is also in an earlier split, as a pair of places."""
    all_digests = np.concatenate([np.asarray(values) for values in digests.values()])
    _, first_index, group = np.unique(all_digests, return_index=True, return_inverse=True)
    starts = np.cumsum([0, *(len(values) for values in digests.values())])
    split = np.repeat(np.arange(len(digests)), np.diff(starts))
    earliest = first_index[group.reshape(-1)]
    duplicates = np.flatnonzero(split[earliest] != split)
    duplicates = duplicates[np.argsort(earliest[duplicates], kind="stable")]
    names = list(digests)

    def location(index: Any) -> dict[str, Any]:
        return {"split": names[split[index]], "index": int(index - starts[split[index]])}

    return [{"a": location(earliest[index]), "b": location(index)} for index in duplicates]


def are_natural(pilot: Mapping[str, Tensor], inputs: Sequence[str], train: Digests, test: Digests) -> bool:
    """Whether inputs of few values make samples equal by chance: in the test data no more of them than in train."""
    if sum(pilot[name][0].numel() for name in inputs) > _FEW_NUMBERS:
        return False
    values = [len(np.unique(column)) for name in inputs for column in as_floats(pilot[name]).T]
    repeats = np.unique(train, return_counts=True)[1]
    is_saturated = max(values, default=0) <= _FEW_VALUES and 4 * len(repeats) <= len(train)  # such as one-hot columns
    share = repeats[repeats > 1].sum() / len(train)
    is_expected = np.isin(test, train).mean() < share + 4 * math.sqrt(share / len(test))
    return bool(is_expected and (is_saturated or math.prod(values) <= 10 * len(train)))


def describe_pictures(pictures: Tensor) -> Tensor:
    """Return the low frequencies of grey pictures inside a round window, so that corners left by a rotation vanish."""
    height, width = pictures.shape[1:]
    window = _round_window(height, width)
    mean = (pictures * window).sum((1, 2), keepdim=True) / window.sum()
    waves = [_cosines(size) for size in (height, width)]
    values = torch.einsum("nij,ia,jb->nab", (pictures - mean) * window, *waves).flatten(1)[:, 1:]
    return functional.normalize(values, dim=1, eps=1e-9)


def count_comparable(training: int, test: int) -> int:
    """Return how many test pictures can be compared with all training pictures in bounded time."""
    return min(test, _MAX_PAIRS // max(training, 1))


def find_picture_copies(train: Tensor, test: Iterable[Tensor]) -> Matches:
    """Return test pictures that are a training picture, mirrored, rotated or shifted; `train`: descriptions."""
    nearest, ratios = [np.empty(0, np.int64)], [np.empty(0)]
    for pictures in test:
        for part in torch.split(pictures, 64):
            similarity = torch.full((len(part), len(train)), -1.0)
            for variant in _variants(part):
                torch.maximum(similarity, describe_pictures(variant) @ train.T, out=similarity)
            top = similarity.topk(min(_PICTURE_NEIGHBOR, len(train)), dim=1)
            distance = (2 - 2 * top.values.double()).clamp(min=0).sqrt()
            gap = (distance[:, 1:] / distance[:, :-1].clamp(min=1e-6)).amax(dim=1)
            ratio = distance[:, 0] / distance[:, -1].clamp(min=1e-9)
            ratios.append(torch.where(gap > _PICTURE_GAP, ratio, torch.ones_like(ratio)).numpy())
            nearest.append(top.indices[:, 0].numpy())
    relative, index = np.concatenate(ratios), np.concatenate(nearest)
    matches = np.flatnonzero(relative < _PICTURE_RATIO)
    return matches, index[matches], relative[matches]


def _variants(pictures: Tensor) -> Iterator[Tensor]:
    count, height, width = pictures.shape
    yield pictures
    yield pictures.flip(1)
    yield pictures.flip(2)
    for angle in _ANGLES:
        sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
        matrix = torch.tensor([[[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]])
        grid = functional.affine_grid(matrix, [1, 1, height, width], align_corners=False).expand(count, -1, -1, -1)
        rotated = functional.grid_sample(pictures[:, None], grid, padding_mode="border", align_corners=False)
        yield rotated[:, 0]
    size = _MAX_SHIFT
    padded = functional.pad(pictures[:, None], (size, size, size, size), mode="replicate")[:, 0]
    for down in range(2 * size + 1):
        for right in range(2 * size + 1):
            if (down, right) != (size, size):
                yield padded[:, down : down + height, right : right + width]


def _round_window(height: int, width: int) -> Tensor:
    down, right = torch.linspace(-1, 1, height)[:, None], torch.linspace(-1, 1, width)[None]
    radius = torch.sqrt(down**2 + right**2).clamp(max=1.0)
    return torch.where(radius < 0.7, torch.ones_like(radius), 0.5 + 0.5 * torch.cos(math.pi * (radius - 0.7) / 0.3))


def _cosines(size: int) -> Tensor:
    position, wave = torch.arange(size)[:, None], torch.arange(min(_WAVES, size))[None]
    norm = torch.where(wave == 0, math.sqrt(1 / size), math.sqrt(2 / size))
    return torch.cos(math.pi * (position + 0.5) * wave / size) * norm


def find_row_copies(train: Floats, test: Floats) -> Matches:
    """Return test rows much closer to a training row than training rows are to each other; equal rows do not count.

    The limit is where clean data of this local dimension would give fewer than `_FALSE_ALARMS` in all.
    """
    none: Matches = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    train, test = (np.clip(rows, -_HUGE, _HUGE) for rows in (train, test))  # the variance of larger numbers overflows
    spread = train.std(axis=0)
    unique = np.unique(train[:, spread > 0] / spread[spread > 0], axis=0, return_index=True)
    points, place = unique[0], unique[1]
    if len(points) < MIN_TRAINING_SAMPLES or not points.shape[1] or not len(test):
        return none
    tree = cKDTree(points)
    own = tree.query(_choose(points), k=_ROW_NEIGHBOR + 1)[0][:, 1:]
    own = own[own[:, 0] > 0]
    if not len(own):
        return none
    ratios = np.sort(own[:, 0] / own[:, -1])
    usual = float(np.quantile(ratios, _TAIL))
    growth = np.log(usual / ratios[ratios <= usual]).mean()  # the smallest ratios show the dimension (Hill)
    power = max(float(growth), 1 / points.shape[1])
    limit = min(_ROW_RATIO, usual * (_FALSE_ALARMS / (_TAIL * len(test))) ** power)
    distances, indices = tree.query(test[:, spread > 0] / spread[spread > 0], k=_ROW_NEIGHBOR)
    ratio = distances[:, 0] / np.maximum(distances[:, -1], 1e-300)
    matches = np.flatnonzero((ratio < limit) & (distances[:, 0] > 0))
    return matches, np.asarray(place[indices[matches, 0]], np.int64), np.asarray(ratio[matches])


def _choose(points: Any) -> Any:
    """Return a fixed random choice, so that the estimate is quick for large data."""
    count = min(len(points), 2000)
    return points[np.random.Generator(np.random.PCG64(6)).choice(len(points), count, replace=False)]
