import pytest
import torch
from torch.nn import functional

from kernels.linear import prepare_linear


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 33, 257])
@pytest.mark.parametrize("shape", [(96, 64), (33, 17), (1, 5), (263, 64)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_the_prepared_product_is_the_plain_one(rows, shape, biased):
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if biased else None
    x = torch.randn(rows, shape[1])
    prepared = prepare_linear(weight.clone(), bias)
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.inference_mode():
        torch.testing.assert_close(prepared(x), wanted.float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_kept(dtype):
    weight, x = torch.randn(8, 4).to(dtype), torch.randn(3, 4).to(dtype)
    out = prepare_linear(weight)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, x @ weight.T)


def test_the_weight_may_go_away():
    weight = torch.randn(40, 24)
    x = torch.randn(5, 24)
    wanted = x @ weight.T
    prepared = prepare_linear(weight)
    weight.fill_(float("nan"))
    if x.device.type == "cpu" and torch._C._has_mkldnn:
        with torch.inference_mode():
            torch.testing.assert_close(prepared(x), wanted)
