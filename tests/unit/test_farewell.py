"""The end of the program waits for threads that are about to come back from C++."""

import threading

import pytest

from objcomm.transport.farewell import end_waits


@pytest.mark.parametrize("name", ["objcomm-listen", "objcomm-connect"])
def test_a_thread_whose_mesh_is_no_more_is_waited_for(name: str) -> None:
    """It may be in the mesh's destructor, and nothing else tells of it."""
    looks: list[threading.Thread] = []
    leave = threading.Event()

    def look() -> tuple[list[object], list[object]]:
        looks.append(thread)
        if len(looks) > 1:
            leave.set()
        return [], []

    thread = threading.Thread(target=leave.wait, args=(30,), name=name)
    thread.start()
    try:
        end_waits(look)  # type: ignore[arg-type]  # there is nothing to be looked at
        assert len(looks) > 1
        assert not thread.is_alive()
    finally:
        leave.set()
        thread.join()


def test_without_such_threads_nothing_waits() -> None:
    looks: list[int] = []

    def look() -> tuple[list[object], list[object]]:
        looks.append(1)
        return [], []

    end_waits(look)  # type: ignore[arg-type]  # there is nothing to be looked at
    assert looks == [1]
