"""``python -m grpc_service.ray`` is the command of `grpc_service.ray.command`."""

import sys

from grpc_service.ray.command import main

if __name__ == "__main__":
    sys.exit(main())
