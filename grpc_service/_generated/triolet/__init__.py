"""Written by tools/regen_proto.py; do not edit."""
