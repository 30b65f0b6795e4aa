"""What is known of operators: where each puts the rows of its operands, and which of them mix rows.

A *row* is one index of the bucketed dimension. A rule is given a call of which an operand or a result has this
dimension. It raises ``RowsMixed`` if a row of a result can depend on another row of an operand, and returns where the
results have the dimension. An operator without a rule is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ...host_graph.sizes import expression
from .row_calls import OperatorCall, RowsMixed, operator_of, shape_text, tensors_in
from .row_indices import check_indices

# Reading to the end of a dimension: torch has several large numbers for it.
_END = 2**31 - 1


# -- rules ----------------------------------------------------------------------------------------------------


def pointwise(call: OperatorCall) -> int | None:
    """Element by element, operands broadcast to the result."""
    (result, *_) = call.results
    # Floating-point division by zero is defined; an integer one ends the process on the CPU.
    whole = not any(r.is_floating_point() or r.is_complex() for r in call.results)
    if whole and operator_of(call.node) in _DIVISIONS and call.nodes["other"] in call.numbered:
        raise RowsMixed("divides integers by what a row's number decides, which may be zero for rows of padding")
    dims = {dim + result.dim() - t.dim() for t in call.tensors() if (dim := call.rows.of(t)) is not None}
    if len(dims) > 1:
        raise RowsMixed("combines rows with rows by broadcasting")
    return dims.pop() if dims else call.rows.of(result)


_DIVISIONS = {"aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod"}


def made(call: OperatorCall) -> int | None:
    """New tensors whose rows are the same, or count from the first one."""
    (result,) = call.results
    counts = operator_of(call.node) in _COUNT
    call.before = sympy.Integer(1) if counts else None
    if counts:
        call.numbered.add(call.node)
    return call.rows.of(result)


_COUNT = {"prims::iota", "aten::arange"}


def along(call: OperatorCall) -> int:
    """Reductions, scans, sorts and the like, along some dimensions."""
    operand = "self" if call.has("self") else next(iter(call.args))
    tensor, result, own = call.args[operand], call.results[0], call.own_dim(operand)
    dims = call.args.get("dim", call.args.get("dims"))
    listed = [dims] if isinstance(dims, int) else list(dims or range(tensor.dim()))
    listed = [dim % tensor.dim() for dim in listed]
    if own in listed:
        raise RowsMixed("works along this dimension")
    return own if result.dim() == tensor.dim() else own - sum(dim < own for dim in listed)


def product(out: str, *, added: str = "", **operands: str) -> Callable[[OperatorCall], int]:
    """Products of matrices: a letter for each dimension of the operands and of the result.

    Args:
        added: the name of an operand that is broadcast and added.
    """

    def rule(call: OperatorCall) -> int:
        letters = {letters[dim] for name, letters in operands.items() if (dim := call.dim(name)) is not None}
        if (dim := call.dim(added)) is not None:
            letters.add(out[dim + len(out) - call.args[added].dim()])
        if len(letters) != 1:
            raise RowsMixed("multiplies rows with rows")
        (letter,) = letters
        if letter not in out:
            raise RowsMixed("multiplies along this dimension, and adds up")
        return out.index(letter)

    return rule


def viewed(call: OperatorCall) -> int:
    """The same elements in the same order, in other dimensions.

    The bucketed dimension may be merged with others and split off again, at any place: in (t, b, d) -> (t * b, d) it
    is the second factor.
    """
    (result,), tensor, own = call.results, call.args["self"], call.own_dim("self")
    if "dtype" in call.args and "size" not in call.args:  # view(dtype)
        if own == tensor.dim() - 1:
            raise RowsMixed("reads rows as numbers of another size")
        return own
    dim = call.rows.of(result)
    if dim is None:
        raise RowsMixed("loses this dimension")
    if call.before is None:
        return dim  # all rows are the same
    # As many elements as before, one after the other, come before those of the next row.
    elements = _elements(tensor.size()[:own]) * call.before
    call.before = sympy.cancel(elements / _elements(result.size()[:dim]))
    after = sympy.cancel(expression(result.size(dim)) / call.rows.symbol / call.before)
    if sympy.denom(call.before) != 1 or sympy.denom(after) != 1:
        raise RowsMixed(f"views {shape_text(tensor)} as {shape_text(result)}, which splits rows")
    return dim


def _elements(sizes: Sequence[Any]) -> Any:
    return sympy.prod(map(expression, sizes))


def strided(call: OperatorCall) -> int:
    """``as_strided`` where it is a view of contiguous elements."""
    tensor, size, stride = call.args["self"], call.args["size"], call.args["stride"]
    offset = call.args.get("storage_offset") or 0
    contiguous = _is_contiguous(tensor.size(), tensor.stride()) and _is_contiguous(size, stride)
    if not contiguous or offset != 0 or expression(tensor.storage_offset()) != 0:
        raise RowsMixed("takes elements by their place in memory")
    return viewed(call)


def _is_contiguous(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    steps = [_elements(size[dim + 1 :]) for dim in range(len(size))]
    pairs = zip(size, stride, steps, strict=True)
    return all(expression(n) == 1 or sympy.expand(expression(given) - step) == 0 for n, given, step in pairs)


def permuted(call: OperatorCall) -> int:
    tensor, own = call.args["self"], call.own_dim("self")
    dims = call.args.get("dims")
    if dims is None:  # transpose(dim0, dim1), t()
        swapped = [call.args.get("dim0", 0) % tensor.dim(), call.args.get("dim1", tensor.dim() - 1) % tensor.dim()]
        dims = list(range(tensor.dim()))
        dims[swapped[0]], dims[swapped[1]] = swapped[1], swapped[0]
    return [dim % tensor.dim() for dim in dims].index(own)


def unsqueezed(call: OperatorCall) -> int:
    own, dim = call.own_dim("self"), call.args["dim"] % (call.args["self"].dim() + 1)
    return own + (dim <= own)


def squeezed(call: OperatorCall) -> int:
    tensor, own = call.args["self"], call.own_dim("self")
    dims = call.args.get("dim")
    listed = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    removed = {dim % tensor.dim() for dim in listed if tensor.size(dim) == 1}
    return own - sum(dim < own for dim in removed)


def expanded(call: OperatorCall) -> int | None:
    (result,), tensor = call.results, call.args["self"]
    own = call.rows.of(tensor)
    return call.rows.of(result) if own is None else own + result.dim() - tensor.dim()


def sliced(call: OperatorCall) -> int:
    """A part of a dimension; of the bucketed one all of it."""
    tensor, own = call.args["self"], call.own_dim("self")
    start, end, step = (call.args.get(name) for name in ("start", "end", "step"))
    if call.args.get("dim", 0) % tensor.dim() == own:
        to_end = end is None or expression(end) == expression(tensor.size(own))
        to_end = to_end or (isinstance(end, int) and end >= _END)
        if start not in (None, 0) or step not in (None, 1) or not to_end:
            raise RowsMixed("takes rows by their number")
    elif any(map(call.rows.in_size, (start, end, step))):
        raise RowsMixed("uses the number of rows as a number")
    return own


def selected(call: OperatorCall) -> int:
    tensor, own = call.args["self"], call.own_dim("self")
    dim = call.args["dim"] % tensor.dim()
    if dim == own:
        raise RowsMixed("takes one row by its number")
    return own - (dim < own)


def written_into(call: OperatorCall) -> int:
    """``slice_scatter``, ``select_scatter``: a tensor with a part of it replaced by ``src``."""
    tensor, own, source = call.args["self"], call.own_dim("self"), call.dim("src")
    dim = call.args.get("dim", 0) % tensor.dim()
    if dim == own:
        raise RowsMixed("writes rows by their number")
    fewer = tensor.dim() - call.args["src"].dim()
    if source is not None and source != own - (fewer if dim < own else 0):
        raise RowsMixed("writes rows to other dimensions")
    return own


def joined(call: OperatorCall) -> int:
    tensors = list(tensors_in(call.args["tensors"]))
    dims = {call.rows.of(tensor) for tensor in tensors}
    own = next(dim for dim in dims if dim is not None)
    if len(dims) > 1 or call.args.get("dim", 0) % tensors[0].dim() == own:
        raise RowsMixed("joins tensors along this dimension")
    return own


def padded(call: OperatorCall) -> int:
    tensor, own, pad = call.args["self"], call.own_dim("self"), list(call.args["pad"])
    place = 2 * (tensor.dim() - 1 - own)
    if any(expression(number) != 0 for number in pad[place : place + 2]):
        raise RowsMixed("pads this dimension")
    return own


def looked_up(call: OperatorCall) -> int:
    """``embedding``: rows of a table, by indices."""
    call.without("weight")
    check_indices(call, call.nodes["indices"], call.args["weight"].size(0))
    return call.own_dim("indices")


def indexed(call: OperatorCall) -> int | None:
    """``x[:, i, j]``: dimensions of ``self`` by tensors of indices."""
    indices, own = call.args["indices"], call.dim("self")
    by_rows = [index for index in tensors_in(list(indices)) if call.rows.of(index) is not None]
    if own is not None and own < len(indices) and indices[own] is not None:
        raise RowsMixed("takes rows by indices")
    if own is not None and by_rows:
        raise RowsMixed("takes elements of each row for each row")
    if any(index.dtype == torch.bool for index in tensors_in(list(indices))):
        raise RowsMixed("takes as many elements as a mask has")
    if len({call.rows.of(index) - index.dim() for index in by_rows}) > 1:  # type: ignore[operator]
        raise RowsMixed("combines rows with rows by broadcasting")
    for dim, node in enumerate(call.nodes["indices"]):
        check_indices(call, node, call.args["self"].size(dim))
    # One operand alone has rows, and the result has one such dimension: it is theirs.
    return call.rows.of(call.results[0])


def index_written(call: OperatorCall) -> int:
    """``x[:, i] = values``, where the indices are the same for each row."""
    tensor, indices, own = call.args["self"], call.args["indices"], call.own_dim("self")
    call.without("indices")
    if any(index.dtype == torch.bool for index in tensors_in(list(indices))):
        raise RowsMixed("writes as many elements as a mask has")
    places = [place for place, index in enumerate(indices) if index is not None]
    if own in places:
        raise RowsMixed("writes rows by indices")
    if places != list(range(places[0], places[-1] + 1)):
        raise RowsMixed("writes by indices of dimensions that are not side by side")
    indexing = max(index.dim() for index in tensors_in(list(indices)))
    moved = own if own < places[0] else own - len(places) + indexing
    target_dims, values = tensor.dim() - len(places) + indexing, call.args["values"]
    source = call.dim("values")
    if source is not None and source + target_dims - values.dim() != moved:
        raise RowsMixed("writes rows to other dimensions")
    return own


def gathered(call: OperatorCall) -> int:
    """``gather``, ``scatter`` and the like: each element has its own index along one dimension."""
    own, index, dim = call.dim("self"), call.own_dim("index"), call.args["dim"] % max(1, call.args["self"].dim())
    check_indices(call, call.nodes["index"], call.args["self"].size(dim))
    if own is None and dim == index and not call.has("src") and "value" not in call.args:
        return index
    if own != index or dim == own or not _same_rows(call, "self", "index", *(("src",) if call.has("src") else ())):
        raise RowsMixed("takes or writes rows by indices")
    return index


def index_selected(call: OperatorCall) -> int:
    own, dim = call.dim("self"), call.args["dim"] % call.args["self"].dim()
    check_indices(call, call.nodes["index"], call.args["self"].size(dim))
    if own is None:
        return int(dim)
    if dim == own or call.dim("index") is not None:
        raise RowsMixed("takes rows by indices")
    return own


def convolved(call: OperatorCall) -> int:
    call.without("weight", "bias")
    if call.own_dim("input") != 0 or call.args["input"].dim() != call.args["weight"].dim():
        raise RowsMixed("works along this dimension")
    return 0


def spatial(dims: int) -> Callable[[OperatorCall], int]:
    """Work in the last dimensions: pooling, resizing, padding, triangles of matrices.

    Args:
        dims: how many.
    """

    def rule(call: OperatorCall) -> int:
        own = call.own_dim("self")
        if own >= call.args["self"].dim() - dims:
            raise RowsMixed("works along this dimension")
        return own

    return rule


def normalised(call: OperatorCall) -> int:
    """Layer normalisation of the last dimensions."""
    own = call.own_dim("input")
    call.without("weight", "bias")
    if own >= call.args["input"].dim() - len(call.args["normalized_shape"]):
        raise RowsMixed("normalises over this dimension")
    return own


def normalised_by_channel(call: OperatorCall) -> int:
    """Batch normalisation with statistics that are known."""
    call.without("weight", "bias", "running_mean", "running_var")
    if call.own_dim("input") == 1:
        raise RowsMixed("has other statistics for each row")
    return call.own_dim("input")


def attention(call: OperatorCall) -> int:
    """Attention of (batch, heads, length, width): a row is a batch or a head."""
    if call.args.get("dropout_p"):
        raise RowsMixed("draws random numbers (dropout_p)")
    names = ("query", "key", "value")
    masks = ("attn_mask", "attn_bias")
    dims = {call.dim(name) for name in names}
    dims |= {dim + 4 - call.args[mask].dim() for mask in masks if (dim := call.dim(mask)) is not None}
    if len(dims) > 1 or not dims <= {0, 1} or call.args["query"].dim() != 4:
        raise RowsMixed("attends along this dimension, or has it in some operands only")
    return next(dim for dim in dims if dim is not None)


def _same_rows(call: OperatorCall, *names: str) -> bool:
    """Whether operands have the dimension at the same place and in the same size: part of it would be other rows."""
    tensors, dims = [call.args[name] for name in names], [call.dim(name) for name in names]
    return dims.count(dims[0]) == len(dims) and len({expression(t.size(dims[0])) for t in tensors}) == 1


def encoder(call: OperatorCall) -> int:
    """torch's fused layers of a transformer, of (batch, length, width)."""
    operands = ("src",) if call.has("src") else ("query", "key", "value")
    dims = {call.dim(name) for name in operands} | ({call.dim("mask")} - {None})
    weights = [name for name in call.args if name not in (*operands, "mask")]
    call.without(*weights)
    if dims != {0} or any(call.args[name].dim() != 3 for name in operands):
        raise RowsMixed("attends along this dimension, or has it in some operands only")
    return 0


# -- the table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What is known of an operator.

    Attributes:
        place: returns the bucketed dimension of the results.
        sizes: arguments in which the number of rows is a size. Anywhere else it would be used as a number.
        others: whether results after the first may have no rows (statistics, the state of a generator).
    """

    place: Callable[[OperatorCall], int | None]
    sizes: frozenset[str] = frozenset()
    others: bool = False


POINTWISE = Rule(pointwise)


def _rules(
    namespace: str, names: str, place: Callable[[OperatorCall], int | None], sizes: str = ""
) -> Mapping[str, Rule]:
    rule = Rule(place, frozenset(sizes.split()), others=place in (attention, normalised_by_channel))
    return {f"{namespace}::{name}": rule for name in names.split()}


RULES: Mapping[str, Rule] = {
    **_rules(
        "aten", "_to_copy copy copy_ alias detach lift_fresh_copy fill contiguous hardswish hardsigmoid", pointwise
    ),
    **_rules("aten", "hardtanh complex polar bitwise_left_shift bitwise_right_shift", pointwise),
    **_rules("prims", "convert_element_type device_put fma view_of", pointwise),
    **_rules("aten", "full empty zeros ones", made, "size"),
    **_rules("aten", "new_full new_empty new_zeros new_ones", made, "size"),
    **_rules("aten", "full_like empty_like zeros_like ones_like", made),
    **_rules("prims", "iota", made, "length"),
    **_rules("aten", "arange", made, "end"),
    **_rules(
        "aten", "sum mean prod amax amin any all var var_mean std std_mean logsumexp nansum count_nonzero", along
    ),
    **_rules("aten", "argmax argmin max min median nanmedian mode kthvalue linalg_vector_norm norm", along),
    **_rules("aten", "cumsum cumprod cummax cummin logcumsumexp sort topk flip roll _softmax _log_softmax", along),
    **_rules("aten", "_fft_r2c _fft_c2r _fft_c2c", along),
    **_rules("prims", "rev", along),
    **_rules("aten", "_safe_softmax unbind split split_with_sizes glu", along),
    **_rules("aten", "mm _int_mm", product("ij", self="ik", mat2="kj")),
    **_rules("aten", "addmm", product("ij", mat1="ik", mat2="kj", added="self")),
    **_rules("aten", "bmm", product("bij", self="bik", mat2="bkj")),
    **_rules("aten", "baddbmm", product("bij", batch1="bik", batch2="bkj", added="self")),
    **_rules("aten", "mv", product("i", self="ik", vec="k")),
    **_rules("aten", "addmv", product("i", mat="ik", vec="k", added="self")),
    **_rules("aten", "dot", product("", self="k", tensor="k")),
    **_rules("aten", "view _unsafe_view reshape", viewed, "size shape"),
    **_rules("aten", "as_strided", strided, "size stride"),
    **_rules("aten", "permute transpose t", permuted),
    **_rules("aten", "unsqueeze", unsqueezed),
    **_rules("aten", "squeeze", squeezed),
    **_rules("aten", "expand", expanded, "size"),
    **_rules("aten", "slice", sliced, "start end"),
    **_rules("aten", "select", selected),
    **_rules("aten", "slice_scatter select_scatter", written_into),
    **_rules("aten", "cat", joined),
    **_rules("aten", "constant_pad_nd", padded),
    **_rules("aten", "embedding", looked_up),
    **_rules("aten", "index _unsafe_index", indexed),
    **_rules("aten", "index_put _unsafe_index_put", index_written),
    **_rules("aten", "gather scatter scatter_add scatter_reduce", gathered),
    **_rules("aten", "index_select", index_selected),
    **_rules("aten", "convolution", convolved),
    **_rules("aten", "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d", spatial(2)),
    **_rules("aten", "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d reflection_pad2d", spatial(2)),
    **_rules("aten", "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d upsample_nearest3d", spatial(3)),
    **_rules("aten", "avg_pool1d upsample_nearest1d upsample_linear1d reflection_pad1d", spatial(1)),
    **_rules("prims", "_low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices", spatial(2)),
    **_rules("aten", "tril triu", spatial(2)),
    **_rules("aten", "_transformer_encoder_layer_fwd _native_multi_head_attention", encoder),
    **_rules("aten", "_native_batch_norm_legit_no_training", normalised_by_channel),
    **_rules("aten", "native_layer_norm _fused_rms_norm", normalised),
    **_rules(
        "aten",
        "scaled_dot_product_attention _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
        attention,
    ),
}
