"""The trainer's accelerator memory, mapped by the raw handles that it sent. Nothing is unpickled."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

HANDLE_BYTES = 64  # cudaIpcMemHandle_t
UUID_PREFIX = "GPU-"


class IpcMappings:
    """Every handle is opened once, on the device that it names. Only for CUDA; the caller closes it after a copy."""

    def __init__(self) -> None:
        from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

        self._runtime = CudaRTLibrary()
        self._devices = device_ordinals(
            [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        )
        self._open: dict[tuple[int, bytes], ctypes.c_void_p] = {}

    def view(self, uuid: str, handle: bytes, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of the trainer's own memory. Raises ValueError for a handle or device that cannot be."""
        refuse_bad_handle(handle, offset)
        ordinal = self._devices.get(uuid.removeprefix(UUID_PREFIX).lower())
        if ordinal is None:
            raise ValueError(f"device {uuid} is not visible here, only {', '.join(self._devices)}")
        with torch.cuda.device(ordinal):
            key = (ordinal, handle)
            if key not in self._open:
                self._open[key] = self._runtime.cudaIpcOpenMemHandle(_as_struct(handle))
            base = self._open[key].value
            assert base is not None
            return torch.as_tensor(_CudaBytes(base + offset, nbytes), device=f"cuda:{ordinal}")

    def close(self) -> None:
        """Unmaps everything; copies must have been made."""
        for (ordinal, _), pointer in self._open.items():
            with torch.cuda.device(ordinal):
                torch.cuda.synchronize()
                self._runtime.lib.cudaIpcCloseMemHandle(pointer)
        self._open.clear()


class _CudaBytes:
    """What torch reads to wrap memory that it does not own."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def device_ordinals(uuids: list[str]) -> dict[str, int]:
    """UUID, as hexadecimal digits with dashes and without a prefix -> this process's number of the device."""
    return {uuid.removeprefix(UUID_PREFIX).lower(): i for i, uuid in enumerate(uuids)}


def refuse_bad_handle(handle: bytes, offset: int) -> None:
    """Raises ValueError for what is no cudaIpcMemHandle_t."""
    if len(handle) != HANDLE_BYTES:
        raise ValueError(
            f"a CUDA IPC handle has {HANDLE_BYTES} bytes, got {len(handle)}: send cudaIpcMemHandle_t as is"
        )
    if offset < 0:
        raise ValueError(f"a tensor's offset in its allocation is {offset}, expected 0 or more")


def _as_struct(handle: bytes) -> Any:
    from vllm.distributed.device_communicators.cuda_wrapper import cudaIpcMemHandle_t

    return cudaIpcMemHandle_t.from_buffer_copy(handle)
