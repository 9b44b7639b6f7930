"""python -m ascend_emulator: a script is given what plain Python would give it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from emulator.tests.launch import EMULATOR, run, write_script

pytestmark = pytest.mark.once(why="its processes have a schedule of their own")

# What a script can see of how it was started. It does not import torch, which makes these tests quick.
REPORT = """
    import inspect, pickle, sys, threading

    class Thing:
        def __init__(self, value):
            self.value = value

    number: int = pickle.loads(pickle.dumps(Thing(3))).value

    if __name__ == "__main__":
        print(number, Thing.__module__, inspect.getsource(Thing).strip())
        print(sys.argv, sys.path, __name__, __file__, __package__, __doc__, __annotations__)
        print(sys.modules["__main__"].__dict__ is globals(), type(__builtins__), __loader__.name)
        print(threading.current_thread() is threading.main_thread())
"""


def check_same(tmp_path: Path, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """What the script prints, which must be the same with and without the emulator."""
    plain = run(*arguments, cwd=tmp_path)
    emulated = run(*EMULATOR, *options, *arguments, cwd=tmp_path)
    assert (emulated.returncode, emulated.stdout) == (plain.returncode, plain.stdout), emulated.stderr
    return emulated.stdout


@pytest.mark.parametrize(
    "spelling", ["script.py", "./script.py", "inner/../script.py", "inner/link.py", "absolute"]
)
def test_a_script_sees_what_plain_python_gives_it(tmp_path: Path, spelling: str) -> None:
    write_script(tmp_path, REPORT)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "link.py").symlink_to("../script.py")
    script = str(tmp_path / "script.py") if spelling == "absolute" else spelling
    printed = check_same(tmp_path, script, "a", options=("--hbm", "1GiB"))
    assert printed.startswith("3 __main__ class Thing:")


@pytest.mark.parametrize(
    "arguments", [("--hbm", "1GiB"), ("-m", "x"), ("--", "y"), ("a", "--", "--stack"), ("--help",), ("",)]
)
def test_options_after_the_script_are_the_scripts(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    script = write_script(tmp_path, "import sys; print(sys.argv)")
    assert check_same(tmp_path, script, *arguments) == f"{[script, *arguments]}\n"


def test_a_script_imports_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    write_script(tmp_path / "inner", "import neighbour")
    (tmp_path / "inner" / "neighbour.py").write_text("print('the right one')")
    (tmp_path / "neighbour.py").write_text("print('the wrong one')")
    assert check_same(tmp_path, "inner/script.py") == "the right one\n"


@pytest.mark.parametrize(
    "ending", ["sys.exit(7)", "sys.exit('what went wrong')", "sys.exit()", "raise SystemExit(3)", "os._exit(9)"]
)
def test_the_exit_code_and_message_are_the_scripts(tmp_path: Path, ending: str) -> None:
    script = write_script(tmp_path, f"import os, sys\nprint('out', flush=True)\n{ending}")
    plain, emulated = run(script, cwd=tmp_path), run(*EMULATOR, script, cwd=tmp_path)
    assert emulated.stdout == "out\n"
    assert (emulated.returncode, emulated.stderr) == (plain.returncode, plain.stderr)


def test_an_exception_shows_the_line_of_the_script(tmp_path: Path) -> None:
    script = write_script(tmp_path, "def fail():\n    raise ValueError('deep down')\n\nfail()\n")
    done = run(*EMULATOR, script, cwd=tmp_path)
    plain = run(script, cwd=tmp_path)
    assert done.returncode == plain.returncode == 1
    # Above the script's own frames the launcher's are shown.
    assert done.stderr.endswith(plain.stderr.removeprefix("Traceback (most recent call last):\n"))
    assert f'File "{tmp_path}/script.py", line 4, in <module>' in done.stderr


def test_a_syntax_error_shows_the_line_of_the_script(tmp_path: Path) -> None:
    done = run(*EMULATOR, write_script(tmp_path, "x = 1\ny = = 2\n"), cwd=tmp_path)
    assert done.returncode == 1
    assert f'File "{tmp_path}/script.py", line 2' in done.stderr
    assert done.stderr.endswith("SyntaxError: invalid syntax\n")


def test_a_module_sees_what_plain_python_gives_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("value = 5")
    shutil.copy(package / "helper.py", tmp_path / "alone.py")
    (package / "__main__.py").write_text(
        "import sys\nfrom .helper import value\n"
        "print(value, sys.argv, sys.path, __name__, __file__, __package__, __spec__.name)\n"
        "print(sys.modules['__main__'].__dict__ is globals())\n"
        "sys.exit(value)\n"
    )
    printed = check_same(tmp_path, "-m", "package", "--", "-m", "--hbm", options=("--hbm", "1GiB"))
    assert printed.startswith("5 [")
    assert check_same(tmp_path, "-m", "alone") == ""


CODE = """
import sys, pickle
class Thing: pass
print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, Thing.__module__)
print(sys.argv, sys.path, __name__, __package__, __doc__, __spec__, __loader__, "__file__" in globals())
print(sys.modules["__main__"].__dict__ is globals(), type(__builtins__))
import neighbour
"""


def test_code_sees_what_plain_python_gives_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("print('found in the current folder')")
    arguments = ("-c", CODE, "a", "-m", "--hbm")
    printed = check_same(tmp_path, *arguments, options=("--hbm", "1GiB", "--races", "--schedule=late"))
    assert printed.startswith("True __main__\n['-c', 'a', '-m', '--hbm']")
    assert printed.endswith("found in the current folder\n")


@pytest.mark.parametrize("code", ["def f():\n    1 / 0\nf()", "x = = 2", "raise SystemExit(3)"])
def test_code_that_fails_fails_as_with_plain_python(tmp_path: Path, code: str) -> None:
    plain, emulated = run("-c", code, cwd=tmp_path), run(*EMULATOR, "-c", code, cwd=tmp_path)
    assert emulated.returncode == plain.returncode != 0
    # Above the code's own frames the launcher's are shown.
    assert emulated.stderr.endswith(plain.stderr.removeprefix("Traceback (most recent call last):\n"))


@pytest.mark.slow(why="a process imports torch")
def test_code_runs_on_the_device_that_its_options_ask_for(tmp_path: Path) -> None:
    code = "import torch; print(torch.npu.device_count(), torch.ones(2, device='npu:1').sum().item())"
    assert run(*EMULATOR, "--devices", "2", "-c", code, cwd=tmp_path).stdout == "2 2.0\n"


@pytest.mark.slow(why="a process imports torch")
def test_pytest_runs_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import ctypes\n\n\ndef test_it():\n    assert ctypes.CDLL('libascendcl.so').aclInit(None) == 0\n"
    )
    done = run(*EMULATOR, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


@pytest.mark.slow(why="a process imports torch")
def test_stdout_carries_only_what_the_script_printed(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        print((torch.ones(2, device="npu") + 1).sum().item(), torch.npu.is_available())
        """,
    )
    assert run(*EMULATOR, script, cwd=tmp_path).stdout == "4.0 True\n"


MISTAKES = {
    "a missing script": (("nothere.py",), "can't open 'nothere.py': No such file or directory"),
    "a folder": (("",), "can't open '': Is a directory"),
    "a missing module": (("-m", "nothere"), "no module named 'nothere'"),
    "a module of a missing package": (("-m", "no.there"), "no module named 'no.there'"),
    "a bad size": (("--hbm", "12 parsecs", "script.py"), "'12 parsecs' is not a size; write it like 4096, "),
    "an empty device": (("--hbm", "0", "script.py"), "a size must be at least 1 byte, not '0'"),
    "a bad rate": (("--h2d", "fast", "script.py"), "'fast' is not a size; write it like 4096, "),
    "a negative rate": (("--d2h=-4GB/s", "script.py"), "'-4GB/s' is not a size; write it like 4096, "),
    "an unknown stack": (("--stack", "older", "script.py"), "unknown stack 'older'; known are 'current' and 'old'"),
    "no script": ((), "error: SCRIPT is missing"),
    "no code": (("-c",), "error: SCRIPT is missing"),
    "an unknown option": (("--hmb", "1GiB", "script.py"), "error: unrecognized arguments: --hmb"),
    "a value that is missing": (("--hbm",), "error: argument --hbm: expected one argument"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line_before_torch_is_loaded(tmp_path: Path, mistake: str) -> None:
    (tmp_path / "torch.py").write_text("print('torch was imported')")
    write_script(tmp_path, "print('the script ran')")
    arguments, message = MISTAKES[mistake]
    done = run(*EMULATOR, *arguments, cwd=tmp_path, pythonpath=tmp_path)
    *usage, line = done.stderr.splitlines()
    assert message in line
    assert all(each.startswith("usage: ") for each in usage)
    assert done.returncode != 0
    assert done.stdout == ""
