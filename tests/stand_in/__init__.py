"""A device that is not the CPU, for machines that have no other: see ``backend.cpp``."""

import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "stand_in"
SOURCE = Path(__file__).with_name("backend.cpp")


@functools.cache
def install() -> None:
    """Make the device type ``stand_in`` known to torch; needs g++, and a minute the first time."""
    torch.ops.load_library(str(compiled()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module(NAME))
    torch.utils.generate_methods_for_privateuse1_backend()


def compiled() -> Path:
    """The backend as a library, compiled unless it is there for this source and this torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"undrop-stand-in-{key}.so"
    if not library.exists():
        root = Path(torch.__file__).parent
        headers = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        how = ["-std=c++20", "-fPIC", "-shared", abi, *headers]
        libraries = [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-ltorch_cpu", "-lc10"]
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made.so"
            subprocess.run(["g++", *how, SOURCE, "-o", made, *libraries], check=True)
            made.replace(library)
    return library


class Event:
    """As on a GPU, what is recorded happens a little later."""

    def record(self) -> None:
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 1


class Module(ModuleType):
    """What ``torch.get_device_module`` returns."""

    Event = Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        torch.ops.stand_in.seed(seed % 2**63)

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return torch.ops.stand_in.random_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        torch.ops.stand_in.set_random_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
