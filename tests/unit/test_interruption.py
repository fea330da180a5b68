"""SIGTERM as Ctrl-C."""

from __future__ import annotations

import signal
import threading

import pytest

from draco_ray.interruption import ended_as_interrupted, handler_of_sigterm_kept


def test_sigterm_interrupts_the_block_and_means_what_it_meant_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ended_as_interrupted():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_another_puts_in_its_place_goes() -> None:
    with ended_as_interrupted():
        ours = signal.getsignal(signal.SIGTERM)
        with handler_of_sigterm_kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is ours


def test_another_thread_can_set_no_handlers_and_goes_on() -> None:
    done = []

    def run() -> None:
        with ended_as_interrupted():
            done.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [before]
