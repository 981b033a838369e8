"""`python -m tools.lab.peers install NAME` and `… list`."""

from __future__ import annotations

import argparse
import sys

from tools.lab.peers.environments import PEERS, PeerError, install


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.lab.peers")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the peers and say which are installed")
    adding = commands.add_parser("install", help="make a peer's own environment")
    adding.add_argument("name", choices=PEERS)
    args = parser.parse_args()
    if args.command == "list":
        for peer in PEERS.values():
            print(f"{peer.name:14s} {'installed' if peer.is_installed else 'not installed'}")
        return 0
    try:
        install(args.name)
    except PeerError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
