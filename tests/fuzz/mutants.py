"""Test the judge: break optimized models in ways that an optimizer might, and count which of them it finds.

    python tests/fuzz/mutants.py --cases 300 --seed 1

A mutant counts where it is visible: on the inputs of the judge, its outputs differ by a hundredth of their largest
value (a quarter in half precision), in their shape, or in which values are not numbers.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / folder) for folder in ("", "fuzz", "patterns"))]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
from fuzz_cases import FuzzCase, case_of  # noqa: E402
from judge import SECONDS, Inputs, Verdict, compare_on  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from sessions import Session, outputs_of  # noqa: E402

from onnxfuse.ir.protos import nodes  # noqa: E402
from onnxfuse.verify.own_process import own_process  # noqa: E402
from onnxfuse.verify.widen import half_precision_of  # noqa: E402

OLDEST = 11  # the first opset with the operators that the mutants write
VISIBLE = {"": 0.01, "half": 0.25}  # of the largest value
Mutate = Callable[[Random, onnx.ModelProto], bool]


@dataclass(frozen=True)
class Mutant:
    """How an optimized model was broken, and what the judge says of it."""

    how: str
    verdict: Verdict

    @property
    def is_found(self) -> bool:
        return self.verdict.is_failure


def mutant_of(case: FuzzCase, random: Random) -> Mutant | None:
    """Return a visible mutant of a case; None where the case has none, or is not compared, or fails itself."""
    if isinstance(case.model, bytes) or case.kind == "hostile":
        return None
    try:
        optimized, _ = case.options.optimized(case.model)
    except Exception:  # that is judged elsewhere
        return None
    inputs = Inputs(case.sizes, case.seed, case.dims, case.special)
    if compare_on(case.model, optimized, inputs, case.options).kind != "same":
        return None
    for how in random.sample(list(MUTATIONS), len(MUTATIONS)):
        changed = onnx.ModelProto()
        changed.CopyFrom(optimized)
        if MUTATIONS[how](random, changed) and any(_visibly(optimized, changed, case, inputs)):
            return Mutant(how, compare_on(case.model, changed, inputs, case.options))
    return None


def _visibly(optimized: onnx.ModelProto, changed: onnx.ModelProto, case: FuzzCase, inputs: Inputs) -> Iterator[bool]:
    """Yield for each draw of inputs whether a changed model differs from what it was."""
    assert isinstance(case.model, onnx.ModelProto)
    share = VISIBLE["half" if case.options.dtype or half_precision_of(case.model) else ""]
    original, before, after = Session(case.model), Session(optimized), Session(changed)
    for feeds in inputs.of(case.model):
        right, there, here = (outputs_of(each, feeds) for each in (original, before, after))
        if right is not None and there is not None and here is not None:
            yield any(differs(value, here[name], share) for name, value in there.items())


def differs(there: Any, here: Any, share: float) -> bool:
    """Return whether an output has another shape, other kinds of numbers, or is off by a share of its largest."""
    if not isinstance(there, np.ndarray) or there.shape != here.shape or there.dtype != here.dtype:
        return isinstance(there, np.ndarray)
    with np.errstate(all="ignore"):
        one, other = there.astype(np.float64), here.astype(np.float64)
        both = np.isfinite(one) & np.isfinite(other)
        if (np.isnan(one) != np.isnan(other)).any() or (both != (np.isfinite(one) | np.isfinite(other))).any():
            return True
        largest = np.abs(one[both]).max(initial=0.0)
        return bool(np.abs(one - other)[both].max(initial=0.0) > share * max(largest, 1e-20))


# --- mutations: each returns whether it has changed the model --------------------------------------------------------


def drop_node(random: Random, model: onnx.ModelProto) -> bool:
    """Replace a node by its first input."""
    found = [n for n in nodes(model.graph, *model.functions) if n.input and n.input[0] and len(n.output) == 1]
    found = [n for n in found if n.op_type != "Identity"]
    if found:
        node = random.choice(found)
        node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output, node.name))
    return bool(found)


def change_constant(random: Random, model: onnx.ModelProto) -> bool:
    """Multiply a constant, or one of its elements, by 1.1, or add 1 to an integer."""
    bodies = nodes(model.graph, *model.functions)
    held = [*model.graph.initializer, *(a.t for n in bodies for a in n.attribute if a.HasField("t"))]
    held = [t for t in held if numpy_helper.to_array(t).size]
    if not held:
        return False
    tensor = random.choice(held)
    array = np.array(numpy_helper.to_array(tensor))
    chosen = np.zeros(array.shape, bool) if random.random() < 0.5 else np.ones(array.shape, bool)
    chosen.reshape(-1)[random.randrange(array.size)] = True
    with np.errstate(all="ignore"):
        new = array + 1 if array.dtype.kind in "iu" else ~array if array.dtype == bool else array * 1.1
        array = np.where(chosen, new, array).astype(array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return True


def _output(random: Random, model: onnx.ModelProto, dtypes: tuple[int, ...]) -> str:
    """Take the name of an output from the node that makes it, and return the new name of that value; "" for none."""
    opset = next((each.version for each in model.opset_import if not each.domain), 0)
    made = {name for node in model.graph.node for name in node.output}
    found = [o for o in model.graph.output if o.name in made and o.type.tensor_type.elem_type in dtypes]
    if not found or opset < OLDEST:
        return ""
    output = random.choice(found)
    output.type.tensor_type.ClearField("shape")
    for node in model.graph.node:
        node.input[:] = [f"{name}::right" if name == output.name else name for name in node.input]
        node.output[:] = [f"{name}::right" if name == output.name else name for name in node.output]
    for node in nodes(model.graph):
        node.input[:] = [f"{name}::right" if name == output.name else name for name in node.input]
    return output.name


def _write(model: onnx.ModelProto, name: str, text: str) -> bool:
    """Write nodes that make an output of RIGHT, its right value."""
    own = text.replace("RIGHT", f"{name}::right").replace("OUT", name)
    for line in own.split("; "):
        op, outputs, *inputs = line.split()
        op, _, given = op.partition("=")
        attributes = {"to": int(given)} if op == "Cast" else {"value_float": float(given)} if op == "Constant" else {}
        named = [f"{name}::{each[1:]}" if each.startswith("$") else each for each in (outputs, *inputs)]
        model.graph.node.append(helper.make_node(op, named[1:], named[:1], **attributes))
    return True


def _floats(random: Random, model: onnx.ModelProto, text: str) -> bool:
    name = _output(random, model, (TensorProto.FLOAT,))
    opset = next((each.version for each in model.opset_import if not each.domain), 0)
    return bool(name) and opset >= 13 and _write(model, name, text)


def wrong_shape_of_empty(random: Random, model: onnx.ModelProto) -> bool:
    """Give an output one axis where it is empty."""
    name = _output(random, model, tuple(TensorProto.DataType.values()))
    if not name:
        return False
    right, kind = f"{name}::right", next(o.type for o in model.graph.output if o.name == name)
    branches = {}
    for branch, op in (("then_branch", "Flatten"), ("else_branch", "Identity")):
        end = f"{name}::{branch}"
        inputs = [right, f"{name}::one_axis"] if op == "Flatten" else [right]
        node = helper.make_node("Reshape" if op == "Flatten" else op, inputs, [end])
        branches[branch] = helper.make_graph([node], branch, [], [helper.make_value_info(end, kind)])
    axis = helper.make_tensor(f"{name}::one_axis", TensorProto.INT64, [1], [-1])
    zero = helper.make_tensor(f"{name}::zero", TensorProto.INT64, [], [0])
    model.graph.initializer.extend([axis, zero])
    model.graph.node.extend([
        helper.make_node("Size", [right], [f"{name}::size"]),
        helper.make_node("Equal", [f"{name}::size", zero.name], [f"{name}::is_empty"]),
        helper.make_node("If", [f"{name}::is_empty"], [name], **branches),
    ])  # fmt: skip
    return True


def fill_with_nan(random: Random, model: onnx.ModelProto) -> bool:
    """Make the largest values of an output NaN."""
    return _floats(
        random, model, "ReduceMax $most RIGHT; Equal $is RIGHT $most; Constant=nan $nan; Where OUT $is $nan RIGHT"
    )


def drop_nan(random: Random, model: onnx.ModelProto) -> bool:
    """Make NaN in an output zero."""
    return _floats(random, model, "IsNaN $is RIGHT; Constant=0 $zero; Where OUT $is $zero RIGHT")


def drop_infinity(random: Random, model: onnx.ModelProto) -> bool:
    """Make infinities in an output the largest number."""
    return _floats(random, model, "IsInf $is RIGHT; Constant=3.4e38 $most; Where OUT $is $most RIGHT")


def change_one_value(random: Random, model: onnx.ModelProto) -> bool:
    """Make the largest values of an output a fiftieth larger."""
    return _floats(random, model, "ReduceMax $most RIGHT; Equal $is RIGHT $most; Constant=1.02 $factor; "
                                  "Mul $more RIGHT $factor; Where OUT $is $more RIGHT")  # fmt: skip


def lose_precision(random: Random, model: onnx.ModelProto) -> bool:
    """Round an output to four bits."""
    return _floats(random, model, f"Cast={TensorProto.FLOAT8E5M2} $low RIGHT; Cast=1 OUT $low")


MUTATIONS: dict[str, Mutate] = {
    each.__name__: each
    for each in (drop_node, change_constant, wrong_shape_of_empty, fill_with_nan, drop_nan, drop_infinity,
                 change_one_value, lose_precision)
}  # fmt: skip


def main() -> int:
    """Print how many mutants of each kind are found, and the seeds of those that are not; return how many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    made, found, missed = Counter(), Counter(), []
    with own_process(SECONDS):
        for seed in range(given.seed * 1_000_000, given.seed * 1_000_000 + given.cases):
            mutant = mutant_of(case_of(seed), Random(f"mutant {seed}"))
            if mutant:
                made[mutant.how] += 1
                found[mutant.how] += mutant.is_found
                missed += [] if mutant.is_found else [f"{seed} {mutant.how}"]
    for how, count in sorted(made.items()):
        print(f"{how}: {found[how]} of {count} found")
    print(f"not found: {', '.join(missed) or 'none'}")
    return len(missed)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
