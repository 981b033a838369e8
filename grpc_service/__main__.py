"""``python -m grpc_service`` is the command ``triolet``."""

import sys

from grpc_service.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
