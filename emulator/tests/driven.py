"""Small programs that use the drives of the machine of timed.py, and tell what time it was."""

from __future__ import annotations

from collections.abc import Callable

from ascend_emulator import DriveOperation, ModelledDrive

from emulator.tests.timed import NBYTES, Bench, Said

DRIVE = ModelledDrive()


def read() -> DriveOperation:
    return DRIVE.submit(NBYTES, read=True)


def write() -> DriveOperation:
    return DRIVE.submit(NBYTES, read=False)


def times(bench: Bench, *operations: DriveOperation) -> list[list[float]]:
    """When they began and ended. It waits for them."""
    for operation in operations:
        operation.wait()
    return [[bench.at(seconds) for seconds in operation.times] for operation in operations]


def one_each_way(bench: Bench) -> Said:
    writing = write()
    submitted = bench.now()
    early = writing.done
    writing.wait()
    written = bench.now()
    return {"submitted": submitted, "early": early, "written": written, "read": times(bench, read())}


def reads_before_writes(bench: Bench) -> Said:
    return {"times": times(bench, write(), write(), read(), read(), write())}


def objects_of_one_drive(bench: Bench) -> Said:
    return {"times": times(bench, write(), ModelledDrive().submit(NBYTES, read=False))}


def two_drives(bench: Bench) -> Said:
    other = ModelledDrive(1)
    return {"times": times(bench, write(), other.submit(NBYTES, read=False), other.submit(NBYTES, read=True))}


def polling(bench: Bench) -> Said:
    operation = write()
    polls = 1
    while not operation.done:
        polls += 1
    return {"polls": polls, "now": bench.now()}


def waiting_for_some_time(bench: Bench) -> Said:
    operation = write()
    waits = []
    for seconds in (100e-6, 0, -1, 1):
        ended = operation.wait(seconds)
        waits.append([ended, bench.now()])
    return {"waits": waits}


def cancelling(bench: Bench) -> Said:
    first, second, third = write(), write(), write()
    cancelled = [first.cancel(), second.cancel(), second.cancel()]
    after = times(bench, first, third)
    return {"cancelled": cancelled, "done": second.done, "times": after, "too late": third.cancel()}


def forgetting(bench: Bench) -> Said:
    """The drive goes on with what nobody asks about."""
    write()
    return {"times": times(bench, write())}


def beside_the_device(bench: Bench) -> Said:
    writing = write()
    bench.up(0)
    bench.join(0)
    joined = bench.now()
    bench.acl.check("aclrtSynchronizeDevice")  # does not wait for the drive
    synchronised = bench.now()
    return {"joined": joined, "synchronised": synchronised, "times": times(bench, writing)}


PROGRAMS: dict[str, Callable[[Bench], Said]] = {
    program.__name__: program
    for program in (
        one_each_way,
        reads_before_writes,
        objects_of_one_drive,
        two_drives,
        polling,
        waiting_for_some_time,
        cancelling,
        forgetting,
        beside_the_device,
    )
}
