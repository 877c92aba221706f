"""`train.preload`: after it a training process has no part of torch left to import."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import train.preload
before = set(sys.modules)
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(json.dumps(sorted(name for name in set(sys.modules) - before if name.startswith("torch._"))))
"""


@pytest.mark.long
def test_first_training_step_imports_no_torch_modules() -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(process.stdout) == []
