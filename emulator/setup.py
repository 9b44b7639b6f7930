"""Puts the sources of the libraries into the package: an installed one compiles them at its first start."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCES = ("Makefile", "runtime", "hccl", "kernels", "watch")


class WithSources(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # a checkout has them beside the package
        target = Path(self.build_lib, "ascend_emulator", "sources")
        for name in SOURCES:
            if Path(name).is_dir():
                shutil.copytree(name, target / name, dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, target)


setup(cmdclass={"build_py": WithSources})
