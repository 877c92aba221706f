"""Pictures and vectors as points: perceptual hashes, and what lies between natural neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.checks.features import Floats, floats_of
from pipeline.checks.neighbours import TABLES, Codes

_FEWEST = 10  # numbers of a sample, for a neighbour to be more than a coincidence
_SIDE = 32  # of the grey picture that is compared
_WAVES = 8  # low frequencies of the cosine transform, each way, that the hash sees
_LONGEST = 1024  # numbers of a vector that is compared; a longer one is projected
_PILOT = 1024  # samples that tell how far natural neighbours are


@dataclass(frozen=True)
class Space:
    """Where samples of these columns are points; far and near is told in units of natural neighbours' distance."""

    columns: tuple[str, ...]
    picture: bool
    centre: Floats
    scale: Floats
    planes: Floats  # a bit of the hash says on which side of one a point lies
    offsets: Floats  # where planes stand; each goes through some training sample, so that they are where samples are
    natural: float  # median distance of a training sample to its nearest neighbour; 0 where there is none to speak of

    @property
    def name(self) -> str:
        more = f" and {len(self.columns) - 1} more" if len(self.columns) > 1 else ""
        return self.columns[0] + more

    @property
    def bits(self) -> int:
        return int(self.planes.shape[1])

    def points(self, batch: Mapping[str, Tensor]) -> Floats:
        return (_raw(batch, self.columns, self.picture) - self.centre) / self.scale

    def codes(self, batch: Mapping[str, Tensor]) -> Codes:
        side = self._sides(self.points(batch)).reshape(-1, TABLES, self.bits // TABLES)
        return np.asarray((side * (1 << np.arange(self.bits // TABLES))).sum(axis=2), np.uint32)

    def furthest(self, batch: Mapping[str, Tensor], limit: float) -> int:
        """Bits in which nearly all copies differ at most, when moved as far as the limit anywhere."""
        points = self.points(batch)[:_PILOT]
        moved = np.random.Generator(np.random.PCG64(4)).standard_normal(points.shape)
        moved *= limit * self.natural / np.sqrt((moved**2).sum(axis=1, keepdims=True))
        flips = (self._sides(points) != self._sides(points + moved)).sum(axis=1)
        return math.ceil(float(np.quantile(flips, 0.99)))

    def _sides(self, points: Floats) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        return np.asarray(points @ self.planes > self.offsets)

    def distances(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Floats:
        """Of pairs, as shares of the natural one."""
        gap = self.points(a) - self.points(b)
        return np.asarray(np.sqrt((gap**2).sum(axis=1)) / self.natural)


def spaces_in(pilot: Mapping[str, Tensor], inputs: Sequence[str], total: int) -> tuple[list[Space], list[str]]:
    """One for each picture and each vector, one for all single numbers together; and why others have none."""
    dense = [name for name in inputs if _is_dense(pilot[name])]
    alone = [name for name in dense if math.prod(pilot[name].shape[1:]) > 1]
    single = tuple(name for name in dense if name not in alone)
    groups = [(name,) for name in alone] + ([single] if single else [])
    found, notes = [], []
    for columns in groups:
        space = _space(pilot, columns, total)
        if space is None:
            notes.append(f"{', '.join(columns)}: too few numbers to tell a near copy from a neighbour")
        elif not space.natural:
            notes.append(f"{space.name}: samples of train do not differ, so near copies cannot be told")
        else:
            found.append(space)
    return found, notes


def is_picture(column: Tensor) -> bool:
    """Grey, or with one, three or four channels first or last."""
    shape = tuple(column.shape[1:])
    if len(shape) == 3 and (shape[0] in (1, 3, 4) or shape[2] in (1, 3, 4)):
        return min(shape[1:] if shape[0] in (1, 3, 4) else shape[:2]) >= _WAVES
    return len(shape) == 2 and min(shape) >= _WAVES


def _is_dense(column: Tensor) -> bool:
    return column.is_floating_point() or column.is_complex() or column.dtype == torch.uint8 or is_picture(column)


def _space(pilot: Mapping[str, Tensor], columns: tuple[str, ...], total: int) -> Space | None:
    some = {name: pilot[name][:_PILOT] for name in columns}
    picture = len(columns) == 1 and is_picture(some[columns[0]])
    raw = _raw(some, columns, picture)
    size = raw.shape[1]
    if size < _FEWEST:
        return None
    spread = raw.std(axis=0)
    scale = np.ones(size) if picture else np.where(spread > 0, spread, 1.0)
    centre = raw.mean(axis=0)
    planes = _planes(size, _picture_side(some[columns[0]]) if picture else None, total)
    points = (raw - centre) / scale
    through = points[np.random.Generator(np.random.PCG64(5)).integers(0, len(points), planes.shape[1])]
    return Space(columns, picture, centre, scale, planes, (through * planes.T).sum(axis=1), _natural(points, total))


def _planes(size: int, side: tuple[int, int] | None, total: int) -> Floats:
    """As many bits a table as leave few strangers in a bucket. Of pictures, mixtures of low frequencies."""
    bits = TABLES * min(24, max(8, math.ceil(math.log2(max(total, 2))) + 1))
    generator = np.random.Generator(np.random.PCG64(1))
    if side is None:
        return np.asarray(generator.standard_normal((size, bits)))
    down, right = (_cosines(length) for length in side)
    waves = np.einsum("ia,jb->ijab", down, right).reshape(size, -1)[:, 1:]  # the first one is the brightness
    return np.asarray(waves @ generator.standard_normal((waves.shape[1], bits)))


def _cosines(length: int) -> Floats:
    place, wave = np.arange(length)[:, None], np.arange(min(_WAVES, length))[None]
    return np.asarray(np.cos(math.pi * (place + 0.5) * wave / length))


def _natural(points: Floats, total: int) -> float:
    """The median, over samples that are no copies, of the distance to the nearest other one of so many.

    Measured among some. Among more the nearest is nearer, by a power that the dimension of the cloud gives, which the
    second neighbour tells (Facco's estimator): else neighbours in a large set would pass for copies.
    """
    norms = (points**2).sum(axis=1)
    squares = norms[:, None] + norms[None] - 2 * points @ points.T
    squares[squares <= 1e-9 * max(float(norms.max(initial=0.0)), 1e-30)] = np.inf  # itself and its copies
    if len(squares) < 3:
        return 0.0
    nearest = np.sqrt(np.partition(squares, 1, axis=1)[:, :2])
    nearest = nearest[np.isfinite(nearest).all(axis=1)]
    if not len(nearest):
        return 0.0
    growth = float(np.log(nearest[:, 1] / nearest[:, 0]).mean())
    return float(np.median(nearest[:, 0]) * min(1.0, len(points) / total) ** growth)


def _raw(batch: Mapping[str, Tensor], columns: Sequence[str], picture: bool) -> Floats:
    if picture:
        return _pictured(batch[columns[0]])
    rows = np.concatenate([floats_of(batch[name]) for name in columns], axis=1)
    rows = np.asarray(np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0))
    if rows.shape[1] <= _LONGEST:
        return rows
    signs = np.random.Generator(np.random.PCG64(2)).integers(0, 2, (rows.shape[1], 256)) * 2.0 - 1
    return np.asarray(rows @ signs / math.sqrt(256))


def _pictured(column: Tensor) -> Floats:
    """Grey, small, and the same whatever its brightness and contrast."""
    grey, side = _grey(column), _picture_side(column)
    if grey.shape[1:] != side:
        grey = functional.adaptive_avg_pool2d(grey[:, None], side)
    small = grey.flatten(1).double().numpy()
    small = small - small.mean(axis=1, keepdims=True)
    length = np.sqrt((small**2).sum(axis=1, keepdims=True))
    return np.asarray(small / np.where(length > 0, length, 1.0))


def _picture_side(column: Tensor) -> tuple[int, int]:
    height, width = _grey(column[:1]).shape[1:]
    return min(_SIDE, height), min(_SIDE, width)


def _grey(column: Tensor) -> Tensor:
    value = column.detach().cpu().float()
    if value.ndim == 4:
        value = value.mean(dim=1 if value.shape[1] in (1, 3, 4) else 3)
    return torch.nan_to_num(value, posinf=0.0, neginf=0.0)
