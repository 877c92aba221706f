"""What whoever runs a service may say otherwise than the bundle: how much it takes, and how it merges requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from pipeline.spec.bundle import Bundle


@dataclass(frozen=True)
class Overrides:
    """None: what the bundle says. The names are the bundle's."""

    max_batch_size: int | None = None
    max_body_bytes: int | None = None
    max_waiting: int | None = None
    deadline_seconds: float | None = None
    max_cache_bytes: int | None = None
    batch_rows: int | None = None
    batch_delay_ms: float | None = None

    def of(self, bundle: Bundle) -> Bundle:
        """The same bundle, digest and all, with these words in its signature; to be proven with them."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        signature = bundle.signature
        parts = {
            part: model.model_copy(update={name: said[name] for name in type(model).model_fields if name in said})
            for part, model in (("limits", signature.limits), ("runtime", signature.runtime))
        }
        return replace(bundle, signature=signature.model_copy(update=parts)) if said else bundle
