"""``python -m grpc_service`` is the command ``triolet``.

Rule: ``python -m`` imports from the working directory first. Unless this package lies there, that
place is taken out of the path before anything else of ours is imported, so that a file called
engine.py there is not taken for ours.
"""

import os.path
import sys

if __name__ == "__main__":
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if not sys.flags.safe_path and os.path.realpath(sys.path[0]) != home:
        del sys.path[0]

    from grpc_service.cli.entry import main

    sys.exit(main())
