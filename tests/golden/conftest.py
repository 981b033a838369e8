"""`pytest tests/golden --rewrite` writes what the scripts print now; commit only what you
understand."""


def pytest_addoption(parser):
    parser.addoption("--rewrite", action="store_true", help="rewrite golden scripts")
