"""`python -m tests.support.gated_packing GATE …`: the command ``triolet …``. Its packing of
weights waits halfway until the file GATE is there, and a load has a line every tenth of a second.
"""

import sys
import time
from pathlib import Path

from engine.worker.forward.block_layer import BlockLayer
from grpc_service.app import startup
from grpc_service.cli.main import main

LAYERS = 8  # that are packed before the gate


def hold_packing(gate: Path) -> None:
    """Have the packing of all layers but the first ones wait for the file ``gate``."""
    pack, packed = BlockLayer._pack, []

    def wait_and_pack(*args):
        packed.append(args)
        while len(packed) > LAYERS and not gate.exists():
            time.sleep(0.01)
        pack(*args)

    BlockLayer._pack = wait_and_pack


if __name__ == "__main__":
    hold_packing(Path(sys.argv[1]))
    startup.LINE_S = 0.1
    sys.exit(main(sys.argv[2:]))
