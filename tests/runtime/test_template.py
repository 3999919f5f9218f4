"""Which variants a plan template has, and which of them it takes; no GPU needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from onnxfuse.runtime.expressions import Expressions, Op
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec
from onnxfuse.runtime.sample_sizes import usual_samples
from onnxfuse.runtime.symint import SLACK, best_first, first_plan_suffices, for_later_plans, minimum
from onnxfuse.runtime.template import (
    MAX_LOSS,
    MAX_LOSS_ELSEWHERE,
    Template,
    Variant,
    candidates_at,
    make_template,
)

GPU = Device("GPU", 90, 132, 1 << 17)
ROWS = TensorSpec((-1, 8), "float16")


@dataclasses.dataclass
class Tiles:
    """A host of kernels that each have a tile of some rows, and `cost` says how long a kernel takes for m rows."""

    tiles: Sequence[int]
    cost: Callable[[Any, int], Any]
    most: int = 1 << 40
    asked: list[int] = dataclasses.field(default_factory=list)

    def supports(self, *_: object) -> str | None:
        return None

    def candidates(self, node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        m: Any = inputs[0].shape[0]
        self.asked.append(m.hint)
        if m > self.most:
            raise ValueError("too many rows")
        found = best_first(self.tiles, lambda tile: self.cost(m, tile))
        kernels = [Kernel("rows", "rows", {"TILE": tile}) for tile in found]
        return [Plan((inputs[0],), (Launch(each, (m, 1, 1), (32, 1, 1), ()),)) for each in kernels]


def template_of(host: Tiles, given: Sequence[Sequence[int]] = ()) -> Template:
    return make_template(host, FusedNode("rows", "rows", ("x",), {}, ("float16",)), [ROWS], GPU, given)


def of_rows(template: Template) -> list[Variant]:
    """Return the variants for one row or more."""
    return [each for each in template.variants if each.plan.steps]


def tile_of(variant: Variant | None) -> int:
    assert variant
    return int(variant.kernels[0].defines["TILE"])


def waves(m: Any, tile: int) -> Any:
    """Return the time of tiles of some rows on eight multiprocessors."""
    return -(-m // (8 * tile)) * (tile + 4.0)


def test_a_template_takes_kernels_that_are_good_enough() -> None:
    tiles = (16, 32, 64, 128, 256)
    template = template_of(Tiles(tiles, waves))
    assert len(template.kernels) == len(of_rows(template)) <= len(tiles)
    for (m,) in usual_samples(1):
        taken, least = waves(m, tile_of(template.chosen([m]))), min(waves(m, tile) for tile in tiles)
        assert taken <= least * (1 + SLACK) * (1 + MAX_LOSS), f"{taken} and not {least} for {m} rows"


def test_where_no_guard_holds_the_least_loss_counts_and_not_the_distance() -> None:
    """At 16 rows the host is asked; at 17 a tile of 16 takes twice as long, although 16 rows are nearer than 128."""

    def cost(m: Any, tile: int) -> Any:
        return -(-m // tile) * (10.0 if tile == 16 else 12.0 if tile == 128 else 0.05 * m + 10.0)

    template = template_of(Tiles((16, 128, 4096), cost), [(16,), (128,)])
    assert [tile_of(each) for each in of_rows(template)][:2] == [16, 128]
    assert tile_of(template.chosen([17])) == 128


@pytest.mark.parametrize(("gain", "kernels"), [(0.025, 1), (0.08, 2)])
def test_a_kernel_that_gains_little_for_a_sliver_of_sizes_is_left_out(gain: float, kernels: int) -> None:
    """One kernel takes 1, and the other one 2, but less than 1 for 113 to 127 rows."""

    def cost(m: Any, tile: int) -> Any:
        inside = minimum(1, (m + 15) // 128) * (1 - minimum(1, m // 128))
        return 1.0 if tile == 1 else 2.0 - (1 + gain) * inside

    assert len(template_of(Tiles((1, 2), cost)).kernels) == kernels


def test_given_sizes_decide_and_all_others_have_a_plan_that_is_fast_enough() -> None:
    """Tiles of 64 rows are the best for 64, those of 1000 rows for many; 8 and 300 are not needed."""

    def cost(m: Any, tile: int) -> Any:
        return -(-m // tile) * (tile + 100.0)

    tiles = (8, 64, 300, 1000)
    host = Tiles(tiles, cost)
    template = template_of(host, [(64,)])
    assert host.asked[0] == 64 and tile_of(template.variants[0]) == 64
    assert [tile_of(each) for each in of_rows(template)] == [64, 1000]
    assert {tile_of(each) for each in of_rows(template_of(host))} == set(tiles)
    for m in range(1, 5000, 7):
        taken, least = cost(m, tile_of(template.chosen([m]))), min(cost(m, tile) for tile in tiles)
        assert taken <= least * (1 + SLACK) * (1 + MAX_LOSS_ELSEWHERE), f"{taken} and not {least} for {m} rows"


def test_no_rows_have_a_plan_without_steps() -> None:
    for given in ([], [(7,)]):
        template = template_of(Tiles((16, 32), waves), given)
        found = template.chosen([0])
        assert found and found.plan.steps == () and not found.soft
        assert all(each.plan.steps for each in template.variants if each is not found)


def test_a_plan_that_divides_by_a_size_is_for_no_size_of_zero() -> None:
    """Python divides by no 0; the estimate of a host that did so would be infinite, and what it rounds to unknown."""

    class Shares(Tiles):
        def candidates(self, node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
            m: Any = inputs[0].shape[0]
            (plan,) = super().candidates(node, inputs, device)
            return [dataclasses.replace(plan, scratch=(math.ceil(1000 / m),), outputs=(TensorSpec((8,), "float16"),))]

    template = template_of(Shares((16,), waves))
    assert template.chosen([1]) is template.variants[0] and template.chosen([0]) is None


def test_a_host_that_refuses_is_asked_once() -> None:
    host = Tiles((16,), waves, most=1000)
    template = template_of(host)
    assert len(of_rows(template)) == 1 and len(host.asked) == 3
    assert template.chosen([1000]) is template.variants[0] and template.chosen([1001]) is None
    with pytest.raises(ValueError, match="too many rows"):
        template_of(Tiles((16,), waves, most=0))


def test_a_host_that_needs_a_number_where_a_size_is_dynamic_has_no_plan() -> None:
    """A compiler goes on with the other nodes; the sentence names the line."""

    class OfNumbers(Tiles):
        def candidates(self, node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
            self.tiles = [int(16 / float(0.5 * inputs[0].shape[0]))]
            return []

    sentence = r"rows: its host has no plan for shapes \[\[-1, 8\]\],.* required at runtime/test_template.py:\d"
    with pytest.raises(ValueError, match=sentence):
        template_of(OfNumbers((16,), waves))


class NotOfFewRows(Tiles):
    """The same host, of whose kernels only the first one takes less than three rows."""

    def candidates(self, node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        if inputs[0].shape[0] < 3:
            return Tiles(self.tiles[:1], self.cost).candidates(node, inputs, device)
        return Tiles(self.tiles[1:], self.cost).candidates(node, inputs, device)


def test_each_size_has_a_plan_however_many_variants_others_take() -> None:
    host = NotOfFewRows([*range(1, 1000, 10)], lambda m, tile: 1.0 * (m - tile) * (m - tile))
    template = template_of(host, [(m,) for m in range(999, 0, -1)])
    assert [tile_of(template.chosen([m])) for m in (1, 2)] == [1, 1]
    assert all(tile_of(template.chosen([m])) > 1 for m in range(3, 1000))


def test_a_template_is_made_of_first_plans() -> None:
    """Hosts may leave out the plans after the first one, which are made if the first one fails or plans are timed."""
    asked: list[bool] = []

    class Asks(Tiles):
        def candidates(self, node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
            asked.append(first_plan_suffices())
            return super().candidates(node, inputs, device)[: 1 if asked[-1] else 2]

    host = Asks((16, 32), waves)
    template = template_of(host)
    assert asked and all(asked) and not first_plan_suffices()
    assert len(candidates_at(host, template, (200,))) == 2 and not asked[-1]


def test_guards_of_later_plans_are_theirs_alone() -> None:
    """What a host asks for the plans behind the first one does not split the sizes for which it has the first one."""

    class Two(Tiles):
        def candidates(self, node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
            m: Any = inputs[0].shape[0]
            first = super().candidates(node, inputs, device)
            with for_later_plans(m):
                best_first((1, 2), lambda tile: waves(m, tile))
                return first * (2 if m > 100 else 1)

    template = template_of(Two((16,), waves))
    assert len(of_rows(template)) == 1 and not template.variants[0].soft
    first, later = candidates_at(Two((16,), waves), template, (200,))
    assert template.expressions.text(next(number for number, _ in set(later.hard) - set(first.hard))) == "less(100, s0)"
    assert first.hard == template.variants[0].hard


def test_a_variant_that_another_thread_adds_while_one_is_chosen_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards of the added variant use expressions whose values are not computed yet."""
    host = Tiles((8, 64), waves)
    template = template_of(host, [(8,)])
    own = Expressions.evaluate

    def late(self: Expressions, *given: Any) -> Any:
        monkeypatch.setattr(Expressions, "evaluate", own)
        values = own(self, *given)
        (added,) = candidates_at(Tiles((16,), lambda m, tile: m * m * tile), template, (4096,))
        needed = self.number(Op.LESS, self.number(Op.SIZE, 0), self.constant(1 << 30))
        template.variants.append(dataclasses.replace(added, hard=((needed, True),)))
        return values

    monkeypatch.setattr(Expressions, "evaluate", late)
    assert tile_of(template.chosen([8])) == 8
