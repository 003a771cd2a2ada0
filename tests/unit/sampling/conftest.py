import pytest
import torch

from . import helpers


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.endswith(("test_distribution", "test_sampler")):
        metafunc.fixturenames.append("_kernels")
        metafunc.parametrize("_kernels", ["native", "reference"], indirect=True)


@pytest.fixture
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "kernels", "auto" if request.param == "native" else "reference")
