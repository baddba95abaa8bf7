"""Imported by Python as it starts, in the ranks of `dsx bench examples` alone (by PYTHONPATH).

What a script trains on, and what it leaves, is noted here, in a process that dsx.run changes and in
one that it does not, by the same code and without a line in the script. Nothing of dsx is imported.
"""

import os
import sys

if os.environ.get("EXAMPLES_NOTES") and os.environ.get("RANK"):
    from importlib.abc import MetaPathFinder
    from importlib.util import find_spec

    class _AfterTorch(MetaPathFinder):
        """Takes notes from where torch has been imported; many only ask whether it is there."""

        is_asking = False

        def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
            if name != "torch" or self.is_asking:
                return None
            self.is_asking = True
            try:
                spec = find_spec(name)
            finally:
                self.is_asking = False
            if spec is None or spec.loader is None:
                return spec
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                sys.meta_path.remove(self)
                execute(module)
                import cpu_shims
                import notes

                notes.take()
                cpu_shims.put(os.environ.get("EXAMPLES_SHIM", ""))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, _AfterTorch())
