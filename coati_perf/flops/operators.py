"""The FLOP of each operator that multiplies matrices, and which others may be passed over.

A multiply-add is 2 FLOP. Element-wise work, reductions, normalisation and data movement count as
none, as in all published figures of model FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Formula = Callable[..., int]


class UnknownOperatorError(Exception):
    """An operator that may multiply matrices has no formula here; ``args[0]`` is its name."""


def _matmul(left: torch.Tensor, right: torch.Tensor, *rest: Any, out: Any) -> int:
    """Return the FLOP of (…, M, K) × (…, K, N), or of ``_grouped_mm`` in all its forms.

    Grouped rows, (M, K) × (E, K, N), go through one expert each; grouped columns, (M, K) × (K, N)
    to (E, M, N), are cut into experts along K. So the experts count only where both operands
    have them.
    """
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1  # noqa: PLR2004
    rows = 1 if left.dim() == 1 else left.shape[-2]
    columns = 1 if right.dim() == 1 else right.shape[-1]
    return 2 * batch * rows * left.shape[-1] * columns


def _matmul_plus(added: Any, left: torch.Tensor, right: torch.Tensor, *rest: Any, out: Any) -> int:
    return _matmul(left, right, out=out)


def _convolution(x: torch.Tensor, weight: torch.Tensor, *rest: Any, out: torch.Tensor) -> int:
    """Each output element sums (channels ÷ groups) · kernel products; transposed: each input."""
    transposed: bool = rest[4]
    places = x if transposed else out
    return 2 * places.numel() * math.prod(weight.shape[1:])


def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any, out: Any
) -> int:
    """The gradients of input and weight take as many products each as the convolution did.

    torch's own counter (2.13) ignores ``groups`` here: for the depthwise convolutions of
    state-space models it is wrong by the number of channels.
    """
    transposed: bool = rest[4]
    wanted: list[bool] = rest[7][:2]
    places = x if transposed else grad
    return 2 * places.numel() * math.prod(weight.shape[1:]) * sum(wanted)


def _solve_triangular(matrix: torch.Tensor, *rest: Any, out: torch.Tensor) -> int:
    """Substitution takes n² FLOP for each right-hand side of n elements."""
    return matrix.shape[-1] * out.numel()


def attention_flop(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """FLOP of q·kᵀ and p·v over every pair of a query and a key; all are (B, heads, T, dim)."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, out: Any
) -> int:
    return attention_flop(query, key, value)


def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    out: Any,
) -> int:
    """Two products for each of the forward's two; what flash kernels recompute is not counted."""
    return 2 * attention_flop(query, key, value)


_ATTENTION_KERNELS = (
    "cudnn_attention",
    "efficient_attention",
    "flash_attention",
    "flash_attention_for_cpu",
    "fused_attention_overrideable",
)
_FORMULAS: dict[str, Formula] = {
    "aten.mm": _matmul,
    "aten.bmm": _matmul,
    "aten.mv": _matmul,
    "aten.dot": _matmul,
    "aten.vdot": _matmul,
    "aten._int_mm": _matmul,
    "aten._scaled_mm": _matmul,
    "aten._grouped_mm": _matmul,
    "aten._scaled_grouped_mm": _matmul,
    "aten.addmm": _matmul_plus,
    "aten.addmv": _matmul_plus,
    "aten.baddbmm": _matmul_plus,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten.linalg_solve_triangular": _solve_triangular,
    **{f"aten._scaled_dot_product_{kernel}": _attention for kernel in _ATTENTION_KERNELS},
    **{
        f"aten._scaled_dot_product_{kernel}_backward": _attention_backward
        for kernel in _ATTENTION_KERNELS
    },
}

# Operators with several floating-point operands that only move data, normalise or reduce. Any
# other such operator is refused, so that matrix work under a new name can't vanish.
_NO_MATRIX_WORK = frozenset(
    (
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "_log_softmax_backward_data",
        "_softmax_backward_data",
        "_unsafe_index_put",
        "as_strided_scatter",
        "cat",
        "copy",
        "copy_",
        "diagonal_scatter",
        "embedding_dense_backward",
        "equal",
        "gather",
        "index_add",
        "index_add_",
        "index_copy",
        "index_copy_",
        "index_put",
        "index_put_",
        "index_reduce",
        "lift_fresh_copy",
        "masked_scatter",
        "masked_scatter_",
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "nll_loss_backward",
        "nll_loss_forward",
        "polar",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "searchsorted",
        "select_scatter",
        "set_",
        "slice_scatter",
        "stack",
    )
)
# Matrix work of a single operand.
_SUSPECT_PREFIXES = ("linalg_", "_linalg_", "fft_", "_fft_", "cholesky", "lu_", "_lu_", "qr")
_KNOWN_NAMESPACES = ("aten", "prim", "prims")


def operator_flop(operator: torch._ops.OpOverload, args: Sequence[Any], out: Any) -> int:
    """Return the FLOP of one call, 0 for an operator without matrix work.

    Raises:
        UnknownOperatorError: the operator may multiply matrices and has no formula.
    """
    formula = _FORMULAS.get(operator_name(operator))
    if formula is not None:
        return formula(*args, out=out)
    if _may_multiply(operator, args):
        raise UnknownOperatorError(operator_name(operator))
    return 0


def operator_name(operator: torch._ops.OpOverload) -> str:
    """Return the name of an operator without its overload, such as ``aten.mm``."""
    return str(operator.overloadpacket)


def _may_multiply(operator: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    namespace, _, name = operator_name(operator).partition(".")
    if operator.is_view or _is_pointwise(operator) or _is_gradient_of_pointwise(namespace, name):
        return False
    operands = sum(_is_operand(arg) for arg in _flat(args))
    if namespace not in _KNOWN_NAMESPACES:
        return operands > 0
    if name.startswith(_SUSPECT_PREFIXES):
        return True
    return operands > 1 and name not in _NO_MATRIX_WORK


def _is_pointwise(operator: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in operator.tags


def _is_gradient_of_pointwise(namespace: str, name: str) -> bool:
    if namespace != "aten" or not name.endswith("_backward"):
        return False
    forward = getattr(torch.ops.aten, name.removesuffix("_backward"), None)
    return forward is not None and _is_pointwise(getattr(forward, forward.overloads()[0]))


def _flat(args: Sequence[Any]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from arg
        else:
            yield arg


def _is_operand(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dim() > 0
