"""Count what a torch module computes when it runs: attentions, rotated tensors, norms, activations, biased products.

The counts come from the calls that the module makes, not from what any matcher finds in a graph.  What a module
computes of its parameters and buffers alone, such as projections of a table of positions, is a constant, and not
counted.  What it computes several times of equal tensors, such as an activation of one embedding in every block,
counts once: results of equal calls of the same tensors are equal.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from survey_fused import STRUCTURES
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

NORM = re.compile(r"(Layer|RMS|Group|Scale)_?Norm")
ROTARY_FUNCTION = re.compile(r"apply_\w*rot\w*emb|apply_rotary|apply_rope")
LIBRARIES = ("transformers.", "timm.", "diffusers.", "torchvision.", "x_transformers.", "vit_pytorch.")
ACTIVATION_FUNCTIONS = frozenset(
    {F.relu, F.gelu, F.silu, F.hardswish, F.mish, F.leaky_relu, F.elu, F.relu6, torch.relu, torch.Tensor.relu}
)
ACTIVATION_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Mish, nn.LeakyReLU,
    nn.ELU, nn.PReLU,
)  # fmt: skip
SOFTMAX = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax})
PRODUCTS = frozenset(
    {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm, torch.einsum}
    | {torch.baddbmm, torch.Tensor.baddbmm}
)
FILLS = frozenset({torch.arange, torch.full, torch.linspace, torch.ones, torch.zeros})  # of numbers alone
# Where values of a product stop being scores: what a layer computes of them is something else.
LAYERS = frozenset(
    {F.linear, torch.addmm, F.conv1d, F.conv2d, F.conv3d, F.layer_norm, F.batch_norm, F.group_norm, F.embedding}
    | {torch.conv1d, torch.conv2d, torch.conv3d, torch.layer_norm, torch.batch_norm, torch.group_norm}
)
# What a graph may do to probabilities in front of the product with the values.
KEEPS_PROBABILITIES = frozenset(
    ("dropout", "to", "type", "type_as", "float", "half", "contiguous", "view", "reshape", "nan_to_num", "masked_fill",
     "where", "__getitem__", "permute", "transpose", "unsqueeze", "squeeze", "expand", "mul", "__mul__", "clone",
     "flatten")
)  # fmt: skip


class CallCounter(TorchFunctionMode):
    """Counts calls of torch functions while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.inside = 0  # modules running whose calls are counted as one
        self._softmaxes = 0
        self._probabilities: dict[int, tuple[torch.Tensor, int]] = {}  # by identity: the tensor, and its softmax
        self._scores: dict[int, torch.Tensor] = {}  # by identity: what is computed of a product, up to the next layer
        self._constants: dict[int, torch.Tensor] = {}  # by identity: buffers, and what is computed of constants alone
        self._computed: set[Hashable] = set()  # what is counted, with the values that it reads
        self._values: dict[int, tuple[torch.Tensor, int, int]] = {}  # by identity: the tensor, its version, its value
        self._results: dict[Hashable, int] = {}  # values that calls have made
        self._new_values = itertools.count()

    def add_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Let buffers be constants until something is written into them."""
        self._constants |= {id(buffer): buffer for buffer in buffers}

    def is_constant(self, tensor: object) -> bool:
        """Return whether a tensor is a parameter or a buffer, or was computed of these alone."""
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._constants

    def is_new(self, what: str, *read: object) -> bool:
        """Return whether this was not computed before of tensors of these values."""
        values = tuple(self._value(each) for each in read if isinstance(each, torch.Tensor))
        known = bool(values) and (what, values) in self._computed
        self._computed.add((what, values))
        return not known

    def _value(self, tensor: torch.Tensor) -> int:
        """Return a number that tensors share which are known to be equal."""
        _, version, value = self._values.get(id(tensor), (tensor, -1, -1))
        if version != tensor._version:
            value = next(self._new_values)
            self._values[id(tensor)] = tensor, tensor._version, value
        return value

    def _key(self, func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> Hashable:
        """Return what calls share whose results are equal; None for one that reads no tensor and may draw numbers."""
        leaves = tree_leaves((args, sorted(given), given))
        if func not in FILLS and not any(isinstance(each, torch.Tensor) for each in leaves):
            return None
        return func, tuple(self._value(each) if isinstance(each, torch.Tensor) else repr(each) for each in leaves)

    def _remember_values(self, key: Hashable, result: Any) -> None:
        made = (each for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        for index, tensor in enumerate(made if key is not None else ()):
            value = self._results.setdefault((key, index), next(self._new_values))
            self._values[id(tensor)] = tensor, tensor._version, value

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count one call, and run it."""
        given = dict(kwargs or {})
        key = self._key(func, args, given)
        result = func(*args, **given)
        self._remember_values(key, result)
        if self._follow_constants(func, args, given, result):
            return result
        if func is F.scaled_dot_product_attention:
            self.counts["attention"] += self.is_new("attention", *args[:2], given.get("query"), given.get("key"))
        elif func is F.multi_head_attention_forward:
            self._count_multi_head(args, given)
        elif func is F.linear:
            has_bias = any(x is not None for x in (*args[2:3], given.get("bias")))
            self.counts["biased products"] += has_bias and self.is_new("product", *tree_leaves((args, given)))
        elif func is torch.addmm:
            self.counts["biased products"] += 1  # Conv1D of transformers
        elif func in ACTIVATION_FUNCTIONS and not self.inside:
            self.counts["activations"] += self.is_new(func.__name__, *tree_leaves((args, given)))
        self._follow_probabilities(func, args, given, result)
        return result

    def _follow_constants(
        self, func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any], result: Any
    ) -> bool:
        """Return whether a call computes tensors of parameters alone, which are then remembered."""
        read = [x for x in tree_leaves((args, given)) if isinstance(x, torch.Tensor)]
        if not read or not all(map(self.is_constant, read)):
            if _writes_into_first(func):
                self._constants.pop(id(args[0]), None)
            return False
        self._constants |= {id(x): x for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return True

    def _count_multi_head(self, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        """Count the attention of nn.MultiheadAttention, which packs the products of equal inputs."""
        query, key, value = args[:3]
        packed = 1 if query is key is value else 2 if key is value else 3
        self.counts["attention"] += 1
        self.counts["biased products"] += packed * (args[6] is not None) + (args[11] is not None)

    def _follow_probabilities(
        self, func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any], result: Any
    ) -> None:
        """Count a softmax of scores as an attention when its result, or what is made of it, is multiplied as a matrix.

        Scores are made of a product.  Weights of an average that a layer computes (outlook attention, dynamic
        convolution) are not.
        """
        read = [x for x in tree_leaves((args, given)) if isinstance(x, torch.Tensor)]
        known = [self._probabilities[id(x)][1] for x in read if id(x) in self._probabilities]
        if func in PRODUCTS:
            for number in set(known):
                self.counts["attention"] += 1
                self._probabilities = {key: each for key, each in self._probabilities.items() if each[1] != number}
        elif func in SOFTMAX and read and id(read[0]) in self._scores and _is_over_keys(args, given, read[0].dim()):
            self._softmaxes += 1
            self._probabilities[id(result)] = result, self._softmaxes
        elif known and getattr(func, "__name__", "") in KEEPS_PROBABILITIES:
            for made in (x for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
                self._probabilities[id(made)] = made, known[0]
        if func in PRODUCTS or (func not in LAYERS and any(id(x) in self._scores for x in read)):
            self._scores |= {id(x): x for x in tree_leaves(result) if isinstance(x, torch.Tensor)}


def _writes_into_first(func: Callable[..., Any]) -> bool:
    """Return whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_over_keys(args: tuple[Any, ...], given: Mapping[str, Any], rank: int) -> bool:
    """Return whether a softmax, of these arguments, is over the last axis of matrices."""
    axis = given.get("dim", args[1] if len(args) > 1 else -1)
    return rank > 2 and axis in (-1, rank - 1)


def count_structures(model: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Return how many of each structure a run of the module computes."""
    counter = CallCounter()
    counter.add_buffers(model.buffers())
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_counted(module, counter))
        stack.enter_context(_counted_rotary(counter))
        stack.enter_context(counter)
        stack.enter_context(torch.no_grad())
        run()
    return {structure: counter.counts[structure] for structure in STRUCTURES}


@contextmanager
def _counted(module: nn.Module, counter: CallCounter) -> Iterator[None]:
    """Count the calls of a module that is a norm or an activation."""
    leaf, name = not any(module.children()), type(module).__name__
    of_transformers = type(module).__module__ == "transformers.activations"
    if leaf and NORM.search(name):
        structure = "norms"
    elif leaf and (isinstance(module, ACTIVATION_MODULES) or of_transformers or "GELU" in name):
        structure = "activations"
    else:
        yield
        return

    def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
        function = repr(module).lower().removesuffix("()")  # SiLU() and F.silu are the same
        what = function if structure == "activations" else f"norm {id(module)}"
        counter.counts[structure] += not (args and counter.is_constant(args[0])) and counter.is_new(what, *args)
        counter.inside += 1

    def end(*_: object) -> None:
        counter.inside -= 1

    handles = module.register_forward_pre_hook(begin), module.register_forward_hook(end)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _counted_rotary(counter: CallCounter) -> Iterator[None]:
    """Count the tensors that functions of the libraries return which apply a rotary embedding."""
    depth = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                result = function(*args, **given)
            finally:
                depth -= 1
            if not depth:
                counter.counts["rotary"] += len(result) if isinstance(result, tuple | list) else 1
            return result

        return call

    replaced: list[tuple[Any, str, Callable[..., Any]]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(LIBRARIES):
            for attribute, value in list(vars(module).items()):
                if callable(value) and ROTARY_FUNCTION.search(attribute) and not isinstance(value, type):
                    replaced.append((module, attribute, value))
    for module, attribute, value in replaced:
        setattr(module, attribute, counted(value))
    try:
        yield
    finally:
        for module, attribute, value in replaced:
            setattr(module, attribute, value)
