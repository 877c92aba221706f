"""Points in, sides out."""

import numpy as np

from pipeline import InvalidPayload


class SideCodec:
    def decode(self, instances):
        try:
            place = np.asarray(instances, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidPayload("instances: each must be a list of 2 numbers") from error
        if place.ndim != 2 or place.shape[1] != 2:
            raise InvalidPayload(f"instances: each must be a list of 2 numbers, found shape {place.shape[1:]}")
        return {"place": place}

    def encode(self, outputs):
        return [{"side": int(row.argmax()), "scores": row.tolist()} for row in outputs["scores"]]
