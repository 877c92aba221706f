"""Build Horovod from PyPI's source against the installed torch, install it, and test it with two processes.

`python -m train.install_horovod`, where g++ and cmake are installed. There is no binary package, and the last
release (0.28.1) sets C++14, but the headers of torch need C++20.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.28.1"
# What its setup.py imports, and what it needs to run. Python 3.11's own setuptools cannot make wheels.
_NEEDED = ("setuptools<81", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "pyyaml")
_FEATURES = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_TEST = """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
assert hvd.size() == 2 and total.item() == 3, (hvd.size(), total)
"""


def install() -> None:
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            sys.exit(f"error: building Horovod needs {tool}; to fix it: install it (apt-get install cmake g++)")
    run(*_PIP, "install", "--quiet", *_NEEDED)
    with tempfile.TemporaryDirectory() as temporary:
        source = download(Path(temporary))
        print(f"building Horovod {VERSION}, which takes minutes", flush=True)
        run(*_PIP, "install", "--quiet", "--no-build-isolation", "--no-deps", str(source), **_FEATURES)
    run(sys.executable, "-c", "import sys; from horovod.runner.launch import run_commandline; run_commandline()",
        "--gloo", "-np", "2", sys.executable, "-c", _TEST)  # fmt: skip
    print("two processes have added a tensor; Horovod is ready")


def download(folder: Path) -> Path:
    """Return the unpacked source, with the standard of C++ that torch needs."""
    run(*_PIP, "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
        f"horovod=={VERSION}", "--dest", str(folder))  # fmt: skip
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"horovod-{VERSION}"
    for file in (source / "CMakeLists.txt", source / "horovod" / "torch" / "CMakeLists.txt"):
        text = file.read_text()
        assert "CMAKE_CXX_STANDARD 14" in text, f"{file.name} is not that of {VERSION}"
        file.write_text(text.replace("CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 20"))
    return source


def run(*command: str, **environment: str) -> None:
    done = subprocess.run(command, env={**os.environ, **environment}, check=False)
    if done.returncode:
        sys.exit(f"error: `{' '.join(command[:6])} …` failed; its output is above")


if __name__ == "__main__":
    install()
