"""Data parallel over slow links: gradients are packed before they are exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from train.strategy.alone import Part
from train.strategy.packing import make_packing, pack
from train.strategy.replicated import Replicated


class Packed(Replicated):
    def warm_up(self, parts: Callable[[], Iterable[Part]]) -> None:
        """Packing begins when the buckets have their lasting order: remainders are kept by bucket."""
        self._packing = make_packing(self.config, self.traffic, self.stopwatch, self.group.device)
        super().warm_up(parts)
        self.ddp.register_comm_hook(self._packing, pack)

    def exchange(self, last: bool) -> contextlib.AbstractContextManager[object]:
        if not last:
            return self.ddp.no_sync()
        self._packing.rescale(self.objective.precision.scaler.get_scale())
        return contextlib.nullcontext()

    def own_state(self) -> Mapping[str, Tensor]:
        return self._packing.state()

    def restore_own(self, tensors: Mapping[str, Tensor]) -> None:
        self._packing.restore(tensors)
