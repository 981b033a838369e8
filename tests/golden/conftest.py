"""Add `--rewrite`, which writes the scripts' present output; commit only what you understand."""


def pytest_addoption(parser):
    parser.addoption("--rewrite", action="store_true", help="rewrite golden scripts")
