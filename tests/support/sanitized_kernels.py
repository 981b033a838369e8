"""A pytest plugin that compiles the kernels with AddressSanitizer and UndefinedBehaviorSanitizer.

The plugin acts on the session that loads it. Either sanitizer ends the process at the first fault.
`tests/conformance/test_kernel_sources.py` runs pytest with this plugin. ``KERNELS_MARCH`` in the
environment is the processor to compile for, ``KERNELS_SOURCES`` the folder of the sources. The
library has a file of its own in the cache, because its name depends on sources and flags.
"""

import os
from pathlib import Path

from engine.worker.forward import native

native.FLAGS = (
    *("-std=c++17", "-O1", "-g", f"-march={os.environ['KERNELS_MARCH']}"),
    *("-fopenmp", "-fPIC", "-shared", "-w"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
)
native.SOURCES = Path(os.environ["KERNELS_SOURCES"])
native.COMPILE_TIMEOUT_S = 600
