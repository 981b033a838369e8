"""Makes tests of async functions that a function of the file runs, as in an engine of its own."""

import inspect
from functools import partial, wraps


def run_by(run, *args, **settings):
    """Return a decorator that makes a test of an async function: ``run(function, *args,
    **settings)`` calls it. The function's keyword-only parameters are pytest's; those that ``run``
    also has go to both."""
    of_run = inspect.signature(run).parameters

    def make(body):
        signature = inspect.signature(body)
        of_pytest = [one for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY]

        @wraps(body)
        def test(**given):
            shared = {name: value for name, value in given.items() if name in of_run}
            run(partial(body, **given), *args, **shared, **settings)

        test.__signature__ = signature.replace(parameters=of_pytest)
        return test

    return make
