"""Python runs this as it starts in a child of a process that has the emulated device. See startup.py.

The device is started when torch is imported, unless the child has started one by then: a child that does without
torch is not slowed down, and need not have it.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

HERE = os.path.dirname(__file__)


class StarterFinder:
    """Finds nothing; is asked for torch before it is imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "torch" and self in sys.meta_path:
            sys.meta_path.remove(self)
            if "ASCEND_EMULATOR_STARTED_BY" in os.environ:
                start()


def start() -> None:
    try:
        load_package()
        from ascend_emulator.startup import start_as_child

        start_as_child()
    except Exception as error:  # whatever is wrong with this interpreter: the child may do without the device
        print(f"ascend_emulator: this child process has no emulated device: {error}", file=sys.stderr)


def load_package() -> None:
    """Loads the parent's ascend_emulator, which the child's interpreter need not have installed."""
    if "ascend_emulator" in sys.modules:
        return
    folder = os.path.dirname(HERE)
    spec = spec_from_file_location(
        "ascend_emulator", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["ascend_emulator"] = package = module_from_spec(spec)
    spec.loader.exec_module(package)


def run_hidden_sitecustomize() -> None:
    hidden = PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(hidden)
        hidden.loader.exec_module(module)


sys.meta_path.insert(0, StarterFinder())
sys.path[:] = [folder for folder in sys.path if folder != HERE]
run_hidden_sitecustomize()
