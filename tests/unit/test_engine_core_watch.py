"""When an engine core counts as standing still."""

from __future__ import annotations

from draco_ray.engine.actor import StallDetector


def test_a_core_stands_still_after_so_many_looks_with_calls_under_way_and_nothing_new() -> None:
    watch = StallDetector(stall_seconds=2.5, look_seconds=1.0)
    assert not any(watch.stands_still(0) for _ in range(10))
    with watch.call():
        assert [watch.stands_still(0) for _ in range(3)] == [False, False, True]
        # An iteration is progress, and so is the answer to another call, which may be none of the model's.
        assert [watch.stands_still(1) for _ in range(3)] == [False, False, False]
        with watch.call():
            pass
        assert [watch.stands_still(1) for _ in range(4)] == [False, False, False, True]
    assert not any(watch.stands_still(1) for _ in range(10))
