"""Lets the tests of this directory import their helpers `model_gguf_bytes` and `model_architectures`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
