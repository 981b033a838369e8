"""Benches: `python -m tools.bench NAME [--json FILE]`. One file per claim."""
