"""These files make Triton an interpreter for the whole process: ``test_triton_interpreter.py`` starts one for them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
