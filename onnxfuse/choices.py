"""Which matches of a model to apply: the file that `onnxfuse plan` writes and `onnxfuse optimize --plan` reads.

Elsewhere in the code, a plan says how a kernel runs a node; the users' term "plan" corresponds to `Choices` here.

A match is named by its fusion, by its last tensor in the original model, and by the body of an If, Loop or Scan that
it is in.  The name is the same in every run.  A match that the file does not list is applied; without a file, all
matches are applied.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import onnx

from onnxfuse.errors import ModelError, UsageError, shortened
from onnxfuse.fuse_model import FusedModel, Settings
from onnxfuse.ir.digest import graph_digest
from onnxfuse.ir.plain_files import read_plain, write_whole
from onnxfuse.rewrite.replace import Fused
from onnxfuse.steps import LeftOut

FORMAT: Final = "onnxfuse-plan"
VERSION: Final = 1
ADVICE: Final = "make it again with `onnxfuse plan`"
MAX_BYTES: Final = 2**28  # maximum size of a file; the file of a model with 100,000 nodes has about 10 MB
MAX_NAME: Final = 200  # maximum characters of a name to compare and to show; comparing longer names takes time


@dataclass(frozen=True)
class Choice:
    """A match, the nodes that it replaces, and whether to apply it."""

    name: str
    fusion: str
    nodes: tuple[str, ...]
    apply: bool = True


@dataclass(frozen=True)
class Choices:
    """Which matches to apply to a model.  The digest of the model's nodes identifies it."""

    model: str
    digest: str
    matches: tuple[Choice, ...]
    left_out: tuple[LeftOut, ...] = ()  # steps that raised when the matches were found; not in the file

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the file as JSON values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": {"name": self.model, "digest": self.digest},
            "matches": [
                {"name": one.name, "fusion": one.fusion, "nodes": list(one.nodes), "apply": one.apply}
                for one in self.matches
            ],
        }

    def write(self, path: Path) -> None:
        """Write the file.  Raises ModelError if that fails."""
        try:
            write_whole(path, (json.dumps(self.to_json(), indent=1) + "\n").encode())
        except OSError as error:
            raise ModelError(f"cannot write the plan '{path}': {error.strerror}; give another name") from error


def choices_of(fused: Iterable[Fused]) -> tuple[Choice, ...]:
    """Return the matches of a run as choices, all applied, in the order in which the run found them."""
    nodes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in fused:
        nodes[one.match, one.fusion] += one.replaces
    return tuple(Choice(*key, tuple(dict.fromkeys(found))) for key, found in nodes.items())


def read_choices(path: Path, model: onnx.ModelProto) -> Choices:
    """Read the choices for a model.

    Raises UsageError if there is no such file, if `onnxfuse plan` did not write it, or if it is for another model.
    """
    try:
        data = json.loads(read_plain(path, MAX_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read the plan '{path}': {error.strerror}; `onnxfuse plan` writes one") from error
    except RecursionError as error:
        raise _not_a_plan(path, "its JSON is nested too deeply") from error
    except ValueError as error:
        raise _not_a_plan(path, f"it is not JSON ({error})") from error
    choices = _parsed(path, data)
    if choices.digest != graph_digest(model):
        raise UsageError(
            f"the plan '{path}' was made for another model, '{shortened(choices.model, MAX_NAME)}': "
            f"the digest of its nodes differs; {ADVICE} for this one"
        )
    return choices


def _parsed(path: Path, data: Any) -> Choices:
    """Return the choices in a file's JSON.  Raises UsageError where something is missing or of another type."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _not_a_plan(path, f'it lacks "format": "{FORMAT}"')
    version, model, listed = data.get("version"), data.get("model"), data.get("matches")
    if version != VERSION:
        found = f"version {shortened(str(version))}" if isinstance(version, int) else "no version"
        raise _not_a_plan(path, f"it has {found}; this onnxfuse reads {VERSION}")
    if not (isinstance(model, dict) and isinstance(model.get("digest"), str)):
        raise _not_a_plan(path, '"model" lacks the "digest"')
    if not isinstance(listed, list):
        raise _not_a_plan(path, '"matches" is not a list')
    matches = tuple(_match(path, i, each) for i, each in enumerate(listed))
    seen: set[str] = set()
    for one in matches:
        if one.name in seen:
            raise _not_a_plan(path, f"it lists '{shortened(one.name, MAX_NAME)}' twice")
        seen.add(one.name)
    name = model.get("name")
    return Choices(name if isinstance(name, str) else "", model["digest"], matches)


def _match(path: Path, place: int, data: Any) -> Choice:
    wanted = {"name": str, "fusion": str, "nodes": list, "apply": bool}
    wrong = [key for key, kind in wanted.items() if not isinstance(data, dict) or not isinstance(data.get(key), kind)]
    if not wrong and not all(isinstance(each, str) for each in data["nodes"]):
        wrong = ["nodes"]
    if wrong:
        kinds = {str: "a text", list: "a list of texts", bool: "true or false"}
        raise _not_a_plan(path, f'"matches"[{place}] needs "{wrong[0]}", which is {kinds[wanted[wrong[0]]]}')
    return Choice(data["name"], data["fusion"], tuple(data["nodes"]), data["apply"])


def _not_a_plan(path: Path, why: str) -> UsageError:
    return UsageError(f"'{path}' is not a plan that can be read: {why}; {ADVICE}")


# --- applying ---------------------------------------------------------------------------------------------------------


@dataclass
class Chosen:
    """Fuses a model without the matches that are switched off.

    The nodes of a match that is switched off stay unfused: no other fusion, no region and no layout takes them.  These
    nodes are known only after fusing, so the model is fused again if a switched-off match was found.
    """

    choices: Choices
    seen: set[str] = field(default_factory=set)  # names of all matches that were found so far

    def __call__(self, result: FusedModel, settings: Settings) -> FusedModel | Settings:
        """Return the model if none of its matches is switched off, else settings that keep their nodes unfused."""
        self.seen |= {one.match for one in result.fused}
        off = set(self.switched_off)
        new = [one for one in result.fused if one.match in off]
        return replace(settings, keep_nodes=_with_nodes(settings.keep_nodes, new)) if new else result

    def check_known(self) -> None:
        """Raise UsageError if the file names a match that no run found."""
        unknown = [one.name for one in self.choices.matches if one.name not in self.seen]
        if unknown:
            near = get_close_matches(unknown[0][:MAX_NAME], self.seen, 1)
            hint = f"did you mean '{shortened(near[0], MAX_NAME)}'? " if near else ""
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise UsageError(
                f"the plan names '{shortened(unknown[0], MAX_NAME)}'{more}, "
                f"which this model does not have with these options; {hint}"
                f"give the options that the plan was made with, or {ADVICE}"
            )

    @property
    def switched_off(self) -> tuple[str, ...]:
        """The names of the matches that are switched off."""
        return tuple(one.name for one in self.choices.matches if not one.apply)


def _with_nodes(kept: Mapping[str, Collection[str]], matches: Iterable[Fused]) -> dict[str, frozenset[str]]:
    """Return `kept` (node labels by graph) plus the labels of the nodes that the matches replace."""
    found = {where: set(labels) for where, labels in kept.items()}
    for one in matches:
        found.setdefault(one.where, set()).update(one.replaces)
    return {where: frozenset(labels) for where, labels in found.items()}
