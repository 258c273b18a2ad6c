"""On PYTHONPATH, in every process: the pretended GPU comes with `import torch`, before torch asks what there is."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class WithGpu(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "torch" else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_both(module: Any) -> None:
                ctypes.CDLL(os.environ["PRETENDED_GPU"], ctypes.RTLD_GLOBAL)
                load(module)
                import fake_cuda

                fake_cuda.install()

            spec.loader.exec_module = load_both  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WithGpu())
