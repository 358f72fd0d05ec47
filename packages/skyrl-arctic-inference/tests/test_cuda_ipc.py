"""Handles of accelerator memory, as far as a machine without an accelerator can check them."""

from __future__ import annotations

import pytest
from skyrl_arctic_inference.engine.cuda_ipc import device_ordinals, refuse_bad_handle


def test_a_handle_is_taken_as_raw_bytes_of_the_drivers_size_only():
    refuse_bad_handle(bytes(64), 0)
    for size in (0, 63, 65, 1 << 20):
        with pytest.raises(ValueError, match=f"has 64 bytes, got {size}"):
            refuse_bad_handle(bytes(size), 0)


def test_an_offset_before_the_allocation_is_refused():
    with pytest.raises(ValueError, match="offset in its allocation is -1"):
        refuse_bad_handle(bytes(64), -1)


def test_devices_are_found_by_uuid_with_and_without_the_drivers_prefix():
    first, second = "0A1B2C3D-0000-0000-0000-000000000001", "GPU-ffff0000-0000-0000-0000-000000000002"
    assert device_ordinals([first, second]) == {first.lower(): 0, second.removeprefix("GPU-"): 1}
