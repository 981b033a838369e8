"""``python -m grpc_service`` is the command ``triolet``.

Rule: ``python -m`` imports from the working directory first. Unless this package lies there, the
working directory is taken out of the path before any other module of Triolet is imported, so that a
file engine.py in it is not imported as `engine`.
"""

import os.path
import sys

if __name__ == "__main__":
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if not sys.flags.safe_path and os.path.realpath(sys.path[0]) != home:
        del sys.path[0]

    from grpc_service.cli.entry import main

    sys.exit(main())
