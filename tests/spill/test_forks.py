from __future__ import annotations

from pathlib import Path

from tests.spill.folders import tree
from tests.spill.light import output_of


def test_a_forked_child_does_not_keep_a_dead_owners_folder(tmp_path: Path) -> None:
    found = output_of(f"""
        ours, theirs = os.pipe()
        owner = os.fork()
        if owner == 0:
            folder = SpillFolder({str(tmp_path)!r}, run="run")
            if os.fork() == 0:
                os.write(theirs, str(os.getpid()).encode())
            signal.pause()
        child = int(os.read(ours, 100))
        print([each.alive for each in owners({str(tmp_path)!r})])
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        print(len(sweep({str(tmp_path)!r})))
        os.kill(child, signal.SIGKILL)
        """)
    assert found == "[True]\n1\n"
    assert tree(tmp_path) == set()


def test_a_forked_child_has_no_part_in_the_folder(tmp_path: Path) -> None:
    """It ends as a program does, with its cleaning up."""
    output_of(f"""
        folder = SpillFolder({str(tmp_path)!r}, run="run")
        os.close(folder.create("a"))
        child = os.fork()
        if child == 0:
            try:
                folder.create("b")
            except Closed as error:
                sys.exit("that of the process that forked" not in str(error))
        assert os.waitpid(child, 0)[1] == 0
        assert sorted(os.listdir(folder.path)) == ["a", "owner"]
        assert [each.alive for each in owners({str(tmp_path)!r})] == [True]
        """)
    assert tree(tmp_path) == set()


def test_a_forked_child_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    output_of(f"""
        folder = SpillFolder({str(tmp_path)!r}, run="parent")
        child = os.fork()
        if child == 0:
            SpillFolder({str(tmp_path)!r}, run="child")
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        assert [each.run for each in owners({str(tmp_path)!r})] == ["parent"]
        """)


def test_a_child_forked_behind_pythons_back_removes_nothing(tmp_path: Path) -> None:
    output_of(f"""
        import ctypes
        folder = SpillFolder({str(tmp_path)!r}, run="run")
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            folder.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        os.close(folder.create("a"))
        """)
    assert tree(tmp_path) == set()
