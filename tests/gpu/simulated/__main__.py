"""`python -m tests.gpu.simulated PROGRAM ARGUMENT...`: runs one of this folder's programs.

SIMULATED_LIBRARY is the accelerator's library, which has to be there before torch is imported.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import sys


def main() -> None:
    faulthandler.enable()  # the line that has touched the device's memory
    ctypes.CDLL(os.environ["SIMULATED_LIBRARY"], mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    torch_cuda = importlib.import_module("tests.gpu.simulated.torch_cuda")
    torch_cuda.install()
    program, *arguments = sys.argv[1:]
    importlib.import_module(f"tests.gpu.simulated.programs.{program}").main(*arguments)


if __name__ == "__main__":
    main()
