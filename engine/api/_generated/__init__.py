"""Written by tools/regen_faces.py; do not edit."""
