"""Changes of a draft, most of which leave it valid: readers, casts, constants, operators, dims, order, control flow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from drafts import FLOATS, SYMBOLS, Draft, Unavailable, types
from inner_graphs import into_branch, into_function, into_loop
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.ir.protos import OneNode, graphs, nodes, subgraphs

SIBLINGS = [
    ("Add", "Sub", "Mul", "Div"), ("Max", "Min"), ("And", "Or", "Xor"), ("Greater", "Less", "LessOrEqual", "Equal"),
    ("Relu", "Sigmoid", "Tanh", "Erf", "Softplus", "Neg", "Abs", "Identity", "Softsign"), ("Softmax", "LogSoftmax"),
    ("ReduceMean", "ReduceSum", "ReduceMax"), ("Sqrt", "Exp", "Reciprocal"), ("Sin", "Cos"),
]  # fmt: skip
NUMBERS = (0.0, 1.0, -1.0, 2.0, 0.5, 1e-12, 1e4, -1e4, 65504.0, 1e9, -1e38, float("inf"), float("-inf"))


def change(draft: Draft) -> None:
    """Apply zero to four random changes, and at the end perhaps write the nodes in another order."""
    random = draft.random
    for _ in range(random.choice([0, 1, 1, 2, 2, 3, 4])):
        written, outputs = list(draft.nodes), list(draft.outputs)
        try:
            random.choices(list(CHANGES), list(CHANGES.values()))[0](draft)
        except Unavailable:
            draft.nodes, draft.outputs = written, outputs
    if not draft.outputs:
        draft.outputs.append(draft.nodes[-1].output[0])
    if random.random() < 0.25:
        random.shuffle(draft.nodes)


def _edges(draft: Draft) -> list[tuple[onnx.NodeProto, int]]:
    return [(node, i) for node in draft.nodes for i, name in enumerate(node.input) if name]


def _interior(draft: Draft) -> list[str]:
    return [name for node in draft.nodes if node.op_type != "Constant" for name in node.output if name]


def _insert(draft: Draft, before: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> None:
    at = next(i for i, node in enumerate(draft.nodes) if node is before)
    draft.nodes[at:at] = nodes


def _dtypes(draft: Draft) -> dict[str, int]:
    return {name: t.tensor_type.elem_type for name, t in types(draft.model()).items()}


def read_outside(draft: Draft) -> None:
    """Make an interior value an output, or let another node read it."""
    name = draft.random.choice(_interior(draft))
    if draft.random.random() < 0.5:
        draft.outputs.append(name)
    else:
        op = draft.random.choice(["Identity", "Shape", "Neg", "Size"])
        draft.outputs.append(draft.node(op, [name]))


def cast_between(draft: Draft) -> None:
    """Round a float to another dtype and back, or only change its dtype, between two nodes."""
    random, known = draft.random, _dtypes(draft)
    edges = [(node, i) for node, i in _edges(draft) if known.get(node.input[i]) in FLOATS]
    if not edges:
        return
    node, index = random.choice(edges)
    name = node.input[index]
    dtype = known[name]
    other = random.choice([d for d in (*FLOATS, TensorProto.DOUBLE) if d != dtype])
    there, back = draft.fresh(), draft.fresh()
    _insert(draft, node, [
        helper.make_node("Cast", [name], [there], f"cast_{there}", to=other),
        helper.make_node("Cast", [there], [back], f"cast_{back}", to=dtype),
    ])  # fmt: skip
    for reader in draft.nodes if random.random() < 0.3 else [node]:
        if reader.name != f"cast_{there}":
            reader.input[:] = [back if n == name else n for n in reader.input]


def do_nothing(draft: Draft) -> None:
    """Put a node that changes nothing, or two that cancel, between two nodes."""
    random, known = draft.random, types(draft.model())
    edges = [
        (n, i) for n, i in _edges(draft) if n.input[i] in known and known[n.input[i]].tensor_type.elem_type in FLOATS
    ]
    if not edges:
        return
    node, index = random.choice(edges)
    name = node.input[index]
    kind = known[name].tensor_type
    rank = len(kind.shape.dim) if kind.HasField("shape") else None
    end = len(draft.nodes)
    one = np.array(1, helper.tensor_dtype_to_np_dtype(kind.elem_type))
    way = random.randrange(9)
    if way == 0:
        result = draft.node("Identity", [name])
    elif way == 1:
        result = draft.node(
            random.choice(["Mul", "Div"]), [name, draft.constant(one.reshape([1] * random.randint(0, 2)))]
        )
    elif way == 2:
        result = draft.node(random.choice(["Add", "Sub"]), [name, draft.constant(one * 0)])
    elif way == 3 and rank:
        perm = random.sample(range(rank), rank)
        result = draft.node("Transpose", [draft.node("Transpose", [name], perm=perm)], perm=np.argsort(perm).tolist())
    elif way == 4 and draft.opset >= 13:
        axes = draft.integers(0)
        result = draft.node("Squeeze", [draft.node("Unsqueeze", [name, axes]), axes])
    elif way == 5:
        result = draft.node("Reshape", [name, draft.node("Shape", [name])])
    elif way == 6:
        result = draft.node("Expand", [name, draft.integers(1)])
    elif way == 7:
        result = draft.node("Cast", [name], to=kind.elem_type)
    else:
        result = draft.node("Concat", [name], axis=-1 if rank else 0)
    new = draft.nodes[end:]
    del draft.nodes[end:]
    node.input[index] = result
    _insert(draft, node, new)


def other_constant(draft: Draft) -> None:
    """Give a constant other values or another shape."""
    random = draft.random
    held = list(draft.weights) + [
        a.t for n in draft.nodes if n.op_type == "Constant" for a in n.attribute if a.name == "value"
    ]
    loops = [node for node in nodes(OneNode(tuple(draft.nodes))) if node.op_type == "Loop"]
    trips = {name for node in loops for name in node.input[:2]}  # 10^9 take hours, and none gives rows of unknown rank
    held = [t for t in held if t.name not in trips and (t.data_type in FLOATS or random.random() < 0.2)]
    if not held:
        return
    tensor = random.choice(held)
    array = np.array(numpy_helper.to_array(tensor))
    way = random.randrange(5)
    with np.errstate(all="ignore"):
        if way == 0 and array.size:
            flat = array.reshape(-1)
            flat[random.randrange(flat.size)] = np.array(random.choice(NUMBERS)).astype(array.dtype)
        elif way == 1:
            array = np.full_like(array, np.array(random.choice(NUMBERS)).astype(array.dtype))
        elif way == 2:
            array = array.reshape([1] * random.randint(0, 3) + list(array.shape))
        elif way == 3 and array.ndim:
            array = array[..., :1]
        else:
            array = (array * np.array(random.choice([-1.0, 2.0, 0.5, 1.0001])).astype(array.dtype)).astype(array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), tensor.name))


def constant_as_input(draft: Draft) -> None:
    """Make a constant an input, which may keep the constant as its default."""
    if not draft.weights:
        return
    tensor = draft.random.choice(draft.weights)
    draft.inputs[tensor.name] = (tensor.data_type, tuple(tensor.dims))
    if draft.random.random() < 0.6:
        draft.weights = [t for t in draft.weights if t is not tensor]


def swap_operands(draft: Draft) -> None:
    """Exchange the first two operands of a node."""
    nodes = [node for node in draft.nodes if len(node.input) == 2]
    if nodes:
        node = draft.random.choice(nodes)
        node.input[:] = node.input[::-1]


def other_operator(draft: Draft) -> None:
    """Replace an operator by one of the same signature."""
    nodes = [(node, group) for node in draft.nodes for group in SIBLINGS if node.op_type in group]
    if nodes:
        node, group = draft.random.choice(nodes)
        node.op_type = draft.random.choice(group)


def rewire(draft: Draft) -> None:
    """Let a node read another value of the same dtype and rank that is computed before it."""
    known = types(draft.model())
    node, index = draft.random.choice(_edges(draft))
    mine = known.get(node.input[index])
    seen: list[str] = list(draft.inputs)
    for other in draft.nodes:
        if other is node:
            break
        seen += other.output
    same = [
        name for name in seen
        if mine is not None and name in known and known[name].tensor_type.elem_type == mine.tensor_type.elem_type
        and len(known[name].tensor_type.shape.dim) == len(mine.tensor_type.shape.dim)
    ]  # fmt: skip
    if same:
        node.input[index] = draft.random.choice(same)


def other_attribute(draft: Draft) -> None:
    """Change an integer, a float or a list of integers that is an attribute."""
    found = [(n, a) for n in draft.nodes for a in n.attribute if a.type in (a.INT, a.FLOAT, a.INTS) and a.name != "to"]
    if not found:
        return
    _, attribute = draft.random.choice(found)
    value = helper.get_attribute_value(attribute)
    new: object
    if isinstance(value, int):
        new = draft.random.choice([-2, -1, 0, 1, 2])
    elif isinstance(value, float):
        new = value * draft.random.choice([0.0, -1.0, 2.0, 10.0])
    else:
        new = draft.random.sample(list(value), len(value))
    attribute.CopyFrom(helper.make_attribute(attribute.name, new, attr_type=attribute.type))


def duplicate(draft: Draft) -> None:
    """Compute a value twice, for different readers."""
    nodes = [node for node in draft.nodes if node.op_type != "Constant"]
    node = draft.random.choice(nodes)
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = draft.fresh("again")
    copy.output[:] = [draft.fresh() if name else "" for name in node.output]
    new = dict(zip(node.output, copy.output, strict=True))
    for body in graphs(*subgraphs(copy)):  # a result has its node's name there; ONNX forbids that of an earlier node
        for each in body.node:
            for names in (each.input, each.output):
                names[:] = [new.get(name, name) for name in names]
        for value in (*body.output, *body.value_info):
            value.name = new.get(value.name, value.name)
    for reader in draft.nodes:
        if reader is not node and draft.random.random() < 0.5:
            reader.input[:] = [new.get(name, name) if name else "" for name in reader.input]
    at = next(i for i, each in enumerate(draft.nodes) if each is node)
    draft.nodes.insert(at + 1, copy)


def other_dims(draft: Draft) -> None:
    """Replace sizes of inputs by symbols, by unknown sizes, or symbols by numbers."""
    random = draft.random
    if not draft.inputs:
        return
    name = random.choice(list(draft.inputs))
    dtype, dims = draft.inputs[name]
    if not dims:
        return
    index = random.randrange(len(dims))
    dim = dims[index]
    by_size = {size: word for word, size in SYMBOLS.items()}
    if isinstance(dim, int) and dim in by_size:
        word = by_size[dim]
        for each, (kind, sizes) in draft.inputs.items():  # one batch is the same everywhere
            draft.inputs[each] = (kind, tuple(word if d == dim else d for d in sizes))
    elif isinstance(dim, str) and random.random() < 0.5:
        new = tuple(None if i == index and draft.sizes.get(dim, 2) == 2 else d for i, d in enumerate(dims))
        draft.inputs[name] = (dtype, new)
    elif isinstance(dim, str):
        draft.inputs[name] = (dtype, tuple(draft.sizes.get(dim, 2) if d == dim else d for d in dims))


def odd_names(draft: Draft) -> None:
    """Give nodes no names, and a value the name of a function, of a node or of another kind."""
    random = draft.random
    for node in draft.nodes:
        node.name = random.choice([node.name, ""])
    old = random.choice(_interior(draft))
    new = random.choice(["layer_norm", "a/b::c.1", "gemm_bias_activation_2", "x_1", "größe", "0", "onnxfuse"])
    if any(new in (*n.input, *n.output) for n in draft.nodes) or any(
        a.HasField("g") for n in draft.nodes for a in n.attribute
    ):
        return
    for node in draft.nodes:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    draft.outputs = [new if name == old else name for name in draft.outputs]


CHANGES: dict[Callable[[Draft], None], int] = {
    read_outside: 4, cast_between: 4, do_nothing: 4, other_constant: 4, constant_as_input: 2, swap_operands: 2,
    other_operator: 3, rewire: 3, other_attribute: 3, duplicate: 2, other_dims: 3, into_branch: 2, into_loop: 2,
    into_function: 1, odd_names: 1,
}  # fmt: skip
