"""torchvision can be installed for another torch than the one beside it; transformers imports it."""

from __future__ import annotations

from pipeline.system.torchvision_operators import declare_torchvision_operators

declare_torchvision_operators()
