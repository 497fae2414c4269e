import pytest

from parity_tests.tiny import FRAMEWORKS


@pytest.fixture(params=["jax", "torch"])
def f(request):
    """One framework's modules and arrays: a test that takes this runs in both."""
    return FRAMEWORKS[request.param]
