"""The workers, which compute models. No other package of the engine imports torch or transformers.

Rule 1: nothing in this package imports trio, grpc or asyncio; plans come in, results go out.
Rule 2: importing the package itself imports no torch; its modules do.

``GOMP_SPINCOUNT`` is the number of spins of libgomp's threads at a barrier, and its default assumes
an idle machine. With two busy processes beside it, a step of 36 ms took 1,444 ms, and 81 ms with
10,000 spins (38 ms alone; D13). libgomp reads the variable once, when torch loads it. So this file
sets the variable before any module of the package can import torch, unless the user has set it.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")
