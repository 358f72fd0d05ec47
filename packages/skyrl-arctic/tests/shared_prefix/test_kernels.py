"""Do the kernels that only some devices have say the same as plain matrix products, merged and in backward?"""

from __future__ import annotations

import pytest
import torch
from arctic_rl.shared_prefix import attention, kernels
from arctic_rl.shared_prefix.layout import Group, Layout

LAYOUT = Layout((Group(0, 5, (3, 1, 4)), Group(13, 2, (2, 2)), Group(19, 4, ())))


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value as a decoder hands them over: strided, keys shared by two heads each."""
    torch.manual_seed(0)
    length = LAYOUT.num_tokens
    return [torch.randn(1, length, h, 8, dtype=dtype).transpose(1, 2).requires_grad_() for h in (4, 2, 2)]


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_flash_and_plain_kernels_agree(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, off: float) -> None:
    found = []
    for kernel in (kernels.FLASH_CPU, kernels.PLAIN):
        monkeypatch.setattr(attention, "pick", lambda _query, kernel=kernel: kernel)
        given = inputs(dtype)
        out = attention.shared_prefix_attention(*given, LAYOUT, 0.3)
        assert out.dtype == dtype
        found.append([out, *torch.autograd.grad((out * torch.linspace(-1, 1, 8, dtype=dtype)).sum(), given)])
    for flash, plain in zip(*found, strict=True):
        assert torch.allclose(flash, plain, rtol=0, atol=off)


def test_the_gradient_is_that_of_differences() -> None:
    small = Layout((Group(0, 2, (2, 1)),))
    given = [t[:, :, :5].detach().requires_grad_() for t in inputs(torch.float64)]
    assert torch.autograd.gradcheck(lambda *qkv: attention.shared_prefix_attention(*qkv, small, 0.3), given)


def test_which_kernel_a_device_and_dtype_get() -> None:
    assert kernels.pick(torch.zeros(1, 1, 1, 8)) is kernels.FLASH_CPU
    on = {"cuda": torch.device("cuda"), "meta": torch.device("meta")}
    for device, dtype, size, wanted in (
        ("cuda", torch.bfloat16, 64, kernels.FLASH_CUDA),
        ("cuda", torch.bfloat16, 36, kernels.PLAIN),
        ("cuda", torch.float32, 64, kernels.PLAIN),
        ("meta", torch.bfloat16, 64, kernels.PLAIN),
    ):
        query = torch.zeros(1, 1, 1, size, dtype=dtype, device="meta")
        assert kernels.pick(Placed(query, on[device])) is wanted  # type: ignore[arg-type]


class Placed:
    """The shape and dtype of a tensor, said to be on a device that this machine may not have."""

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, device
