"""Copies by several threads, by the C loop and without it."""

from __future__ import annotations

import os
import shutil
import signal
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlplane.storage import copying
from rlplane.storage.copying import copy_all, copy_table

MB = 2**20


@pytest.fixture(params=["native", "python"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(copying, "native", None)
    elif not copying.is_native():
        pytest.skip("rlplane was installed without a C compiler")
    return str(request.param)


def test_the_loop_is_compiled_where_it_can_be() -> None:
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    assert copying.is_native() or not headers or shutil.which("cc") is None


def random_bytes(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 5 * MB + 3, 11 * MB + 77])
def test_every_byte_arrives_and_none_beside_it(loop: str, nbytes: int) -> None:
    source = random_bytes(nbytes)
    targets = [np.full(nbytes + 200, 0xEE, np.uint8) for _ in range(3)]
    # To every kind of address: streamed stores need aligned ones.
    shifts = (64, 77, 100)
    copy_all(
        [(t.ctypes.data + by, source.ctypes.data, nbytes) for t, by in zip(targets, shifts, strict=True)]
    )
    for target, by in zip(targets, shifts, strict=True):
        assert np.array_equal(target[by : by + nbytes], source)
        assert (target[:by] == 0xEE).all() and (target[by + nbytes :] == 0xEE).all()


@pytest.mark.parametrize("most", [40, 3000, 70_000])
def test_many_pieces_of_any_length_are_gathered(loop: str, most: int) -> None:
    random = np.random.default_rng(most)
    source = random_bytes(16 * MB)
    sizes = random.integers(0, most, 2000)
    begins = random.integers(0, len(source) - most, 2000)
    target = np.full(int(sizes.sum()) + 1, 0xEE, np.uint8)
    table = np.stack(
        [target.ctypes.data + np.cumsum(sizes) - sizes, source.ctypes.data + begins, sizes], axis=1
    )
    copy_table(table)
    wanted = [source[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    assert np.array_equal(target[:-1], np.concatenate(wanted)) and target[-1] == 0xEE


def test_threads_that_copy_at_once_do_not_mix_their_bytes(loop: str) -> None:
    sources = [random_bytes(9 * MB + number) for number in range(6)]
    targets = [np.zeros_like(source) for source in sources]

    def copy(number: int) -> None:
        source = sources[number]
        for _ in range(5):
            targets[number][:] = 0
            copy_all([(targets[number].ctypes.data, source.ctypes.data, source.nbytes)])
            assert np.array_equal(targets[number], source)
            done[number] += 1

    done = [0] * len(sources)
    threads = [threading.Thread(target=copy, args=(number,)) for number in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [5] * len(sources)


def test_a_copy_that_is_cancelled_begins_no_more_pieces(loop: str) -> None:
    source, target = random_bytes(100), np.zeros(100, np.uint8)
    job = copying._Job(np.array([(target.ctypes.data, source.ctypes.data, 100)]), streaming=False)
    job.cancel()
    job.help()
    job.finish()
    assert not target.any()


@pytest.fixture
def interrupts() -> Iterator[Callable[[float], threading.Timer]]:
    """Ctrl-C after so many seconds, in the middle of whatever the main thread does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def after(seconds: float) -> threading.Timer:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR1))
        timer.start()
        return timer

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield after
    signal.signal(signal.SIGUSR1, before)


def test_a_copy_can_be_interrupted_at_any_moment_and_has_ended_then(
    loop: str, interrupts: Callable[[float], threading.Timer]
) -> None:
    source = random_bytes(9 * MB)
    target = np.zeros_like(source)
    random = np.random.default_rng(3)
    interrupted = 0
    for _ in range(300):
        try:
            timer = interrupts(float(random.uniform(0, 1e-3)))
            try:
                copy_all([(target.ctypes.data, source.ctypes.data, source.nbytes)])
            finally:
                timer.cancel()
                timer.join()
        except KeyboardInterrupt:
            interrupted += 1
        # Who still copied would write into this.
        target[::4096] = 0
        time.sleep(0.0005)
        assert not target[::4096].any()
    assert interrupted


def test_a_copy_that_is_interrupted_while_it_waits_for_a_helper_goes_on_waiting(
    monkeypatch: pytest.MonkeyPatch, interrupts: Callable[[float], threading.Timer]
) -> None:
    # The helper is slow; Ctrl-C comes when the caller has nothing left to copy.
    running: list[int] = []
    helped = threading.Event()
    caller = threading.get_ident()

    def slow(target: int, source: int, nbytes: int) -> None:
        if threading.get_ident() == caller:
            helped.wait(10)
            return
        running.append(target)
        helped.set()
        time.sleep(0.5)
        running.remove(target)

    monkeypatch.setattr(copying, "native", None)
    monkeypatch.setattr(copying, "memmove", slow)
    monkeypatch.setattr(copying, "_helpers", one_helper())
    interrupts(0.2)
    with pytest.raises(KeyboardInterrupt):
        copy_all([(number, 0, 2 * MB) for number in range(3)])
    assert helped.is_set() and not running


def one_helper() -> Any:
    helpers = copying._Helpers()
    helpers._pid, helpers._count = os.getpid(), 1
    threading.Thread(target=helpers._run, args=(helpers._queue,), daemon=True).start()
    return helpers


def test_without_threads_to_be_had_the_caller_copies_alone(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying, "_helpers", copying._Helpers())
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    source = random_bytes(5 * MB)
    for _ in range(2):
        target = np.zeros_like(source)
        copy_all([(target.ctypes.data, source.ctypes.data, source.nbytes)])
        assert np.array_equal(target, source)


@pytest.mark.parametrize("numbers", [[], [0, 1], [0, 1, 0, 0], [0, 2, 0, 0, 1, 2, 3], [0, -1, 0, 0, 1, 2, 3]])
def test_a_job_that_is_not_one_is_refused(numbers: list[int]) -> None:
    if copying.native is None:
        pytest.skip("rlplane was installed without a C compiler")
    with pytest.raises(ValueError, match="as many copies"):
        copying.native(np.array(numbers, np.int64), True)
