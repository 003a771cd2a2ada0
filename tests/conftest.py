"""Fixtures shared by all tests: tiny random checkpoints that a real engine can load, and real deployments."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest

from clusters import Cluster
from tiny_models import ExpertLayout, write_tiny_llama, write_tiny_model

StartCluster = Callable[..., AbstractAsyncContextManager[Cluster]]


class MakeTinyLlama(Protocol):
    """Writes a tiny random Llama checkpoint; see the fixture ``make_tiny_llama``."""

    def __call__(self, folder: Path, *, seed: int = 0, num_shards: int = 1, **overrides: Any) -> Path:
        """Returns ``folder``. ``overrides`` are config.json keys; ``torch_dtype`` is the dtype of the weights."""


class MakeTinyModel(Protocol):
    """Writes a tiny random checkpoint of any family; see the fixture ``make_tiny_model``."""

    def __call__(
        self,
        family: str,
        folder: Path,
        *,
        seed: int = 0,
        sharded: bool = False,
        expert_layout: ExpertLayout = "single",
        **overrides: Any,
    ) -> Path:
        """Returns ``folder``. ``overrides`` are attributes of the family's configuration in transformers."""


SLOW_LIMIT_S = 3600
"""For tests that only ``make test-all`` runs; pyproject.toml has the limit of the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Keeps torch to one thread: tests share few cores, and results must not depend on their number."""
    try:
        import torch
    except ImportError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_tiny_llama() -> MakeTinyLlama:
    """A function that writes a Hugging Face folder: config, weights, byte-level tokenizer, chat template.

    The vocabulary holds every byte, so any text can be tokenised. Weights are scaled so that logits differ clearly.
    """
    return write_tiny_llama


@pytest.fixture(scope="session")
def make_tiny_model() -> MakeTinyModel:
    """A function (family, folder) that writes a folder as ``make_tiny_llama`` does, through transformers (slower).

    Families: the keys of ``tiny_models.FAMILIES``. Windows are smaller than most prompts.
    """
    return write_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One float32 tiny Llama (grouped-query, untied) for all tests of a session; read-only."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def start_cluster(tmp_path: Path) -> StartCluster:
    """``async with start_cluster(model, prefill=1, decode=1, settings={...}) as cluster``: a ready deployment."""

    @contextlib.asynccontextmanager
    async def start(model: Path, *args: Any, **kwargs: Any) -> AsyncIterator[Cluster]:
        async with Cluster.of(tmp_path, model, *args, **kwargs).started() as cluster:
            yield cluster

    return start
