"""Benches: `python -m tools.lab.bench NAME [--json FILE]`. One file per claim."""
