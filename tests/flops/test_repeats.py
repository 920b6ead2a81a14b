"""What is made again is what the operator returns, and what shares memory is never made again."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from coati_perf.flops.repeats import Repeats

aten = torch.ops.aten


def empty(*shape, dtype=torch.float32, device="meta"):
    return torch.empty(shape, dtype=dtype, device=device)


class Counted:
    """An operator that counts how often it is called."""

    def __init__(self, operator) -> None:
        self.operator, self.calls = operator, 0
        self._schema = operator._schema

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.operator(*args, **kwargs)


def form(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


CALLS = {
    "promoted": (aten.add.Tensor, (empty(3, 1, dtype=torch.bfloat16), empty(4)), {"alpha": 2}),
    "by a number": (aten.mul.Tensor, (empty(3, dtype=torch.int64), 2.5), {}),
    "transposed": (aten.neg.default, (empty(2, 5).t(),), {}),
    "a list": (aten.cat.default, ([empty(2, 3), empty(4, 3)], 0), {}),
    "another dtype": (aten._to_copy.default, (empty(2, 3),), {"dtype": torch.float16}),
    "reduced": (aten.mean.dim, (empty(2, 3, 4), [1, -1], True), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeat_is_what_the_operator_returns(name):
    operator, args, kwargs = CALLS[name]
    counted, repeats = Counted(operator), Repeats()
    expected = form(operator(*args, **kwargs))
    assert [form(repeats.call(counted, args, kwargs)) for _ in range(3)] == [expected] * 3
    assert counted.calls == 1


def test_other_arguments_are_no_repeat():
    repeats = Repeats()
    for args, dtype in [
        ((empty(3, dtype=torch.int64), 2), torch.int64),
        ((empty(3, dtype=torch.int64), 2.0), torch.float32),
        ((empty(3, dtype=torch.float64), 2), torch.float64),
    ]:
        assert repeats.call(aten.mul.Tensor, args, {}).dtype is dtype
    one, other = (repeats.call(aten.neg.default, (x,), {}) for x in (empty(2, 5), empty(5, 2).t()))
    assert one.stride() != other.stride()


def test_views_and_writes_reach_their_tensor():
    repeats, x = Repeats(), empty(2, 6)
    for operator, args in [
        (aten.view.default, (x, [3, 4])),
        (aten.add_.Tensor, (x, 1)),
        (aten.mul.out, (x, 2)),
    ]:
        for _ in range(2):
            kwargs = {"out": x} if operator is aten.mul.out else {}
            out = repeats.call(operator, args, kwargs)
            assert out.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_data_and_fake_tensors_are_left_to_the_operator():
    repeats, ones = Repeats(), torch.ones(3)
    assert torch.equal(repeats.call(aten.neg.default, (ones,), {}), -ones)
    assert torch.equal(repeats.call(aten.neg.default, (2 * ones,), {}), -2 * ones)
    with FakeTensorMode():
        fake = torch.ones(3)
        for _ in range(2):
            assert type(repeats.call(aten.neg.default, (fake,), {})) is type(fake)


def test_several_outputs_and_errors_are_left_to_the_operator():
    repeats = Repeats()
    for _ in range(2):
        values, indices = repeats.call(aten.topk.default, (empty(2, 8), 3), {})
        assert (values.shape, indices.dtype) == ((2, 3), torch.int64)
        with pytest.raises(Exception, match=r"[Mm]eta"):
            repeats.call(aten.nonzero.default, (empty(4),), {})
