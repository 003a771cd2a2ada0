"""The import table of docs/architecture.md, the length of files, and the names that must stay off the import path."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {"twinpool.config", "twinpool.errors", "twinpool.rpc", "twinpool.tls", "twinpool.grpc_errors"}
ROLE = SHARED | {"twinpool.worker", "twinpool.engine", "twinpool.kv_transfer", "twinpool.proto"}
# Folder -> what it may import of ours (prefixes), besides itself.
ALLOWED = {
    "proto": set(),
    "router": SHARED | {"twinpool.block_hash", "twinpool.logs", "twinpool.proto"},
    "engine": {"twinpool.block_hash", "twinpool.kernels", "twinpool.kv_transfer.layout"},
    "worker": SHARED
    | {"twinpool.block_hash", "twinpool.logs", "twinpool.engine", "twinpool.kv_transfer", "twinpool.proto"},
    "prefill_worker": ROLE,
    "decode_worker": ROLE,
    "kv_transfer": {"twinpool.huge_pages"},
    "kernels": {"twinpool.cache", "twinpool.huge_pages"},
}
# Third-party package -> the only folders (or files) that may import it.
CONFINED = {
    "torch": ("engine/", "worker/", "prefill_worker/", "decode_worker/", "kv_transfer/", "kernels/"),
    "nixl": ("kv_transfer/connectors/nixl",),
    "ray": ("twinpool/controller/ray_", "worker/ray_"),
    "triton": ("kernels/",),
    "fastapi": ("router/",),
    "gguf": ("twinpool/gguf_folder.py", "twinpool/demo_model.py"),
}
FOLDERS = [*ALLOWED, "twinpool"]


def product_files() -> list[Path]:
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if "_pb2" not in file.name)


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "twinpool" else {node.module}
    return found


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


@pytest.mark.parametrize("file", product_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_follow_the_table(file: Path) -> None:
    place = file.relative_to(ROOT).as_posix()
    folder = place.split("/")[0]
    for name in sorted(imports(file)):
        if under(name, "twinpool") and folder != "twinpool":
            allowed = {f"twinpool.{folder}", *ALLOWED[folder]}
            assert any(under(name, prefix) for prefix in allowed), f"{place} may not import {name}"
        package = name.split(".")[0]
        assert package not in FOLDERS[:-1], f"{place}: import twinpool.{name}, not {name}"
        if package in CONFINED:
            assert place.startswith(CONFINED[package]), f"{place} may not import {name}"


@pytest.mark.parametrize("file", product_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_files_stay_short(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    reason = "longer than 400 lines because" in (ast.get_docstring(ast.parse(text)) or "").lower()
    assert len(text.splitlines()) <= 400 or reason, "split it, or begin with why it is 'longer than 400 lines because'"


def test_folders_do_not_shadow_other_packages() -> None:
    """Transformers and google-api-core probe for kernels and proto; ours must not answer, even from the repo root."""
    code = (
        "import twinpool, transformers, sys; from transformers import AutoModelForCausalLM; "
        "print([name for name in ('kernels', 'proto', 'router', 'engine', 'worker') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
