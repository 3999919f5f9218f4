"""Every fusion has one host at most."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter

import onnxfuse.kernels
from onnxfuse.runtime.hosts import find_host


def test_a_fusion_that_no_family_names_has_no_host() -> None:
    assert find_host("no_such_fusion") is None


def test_every_fusion_has_one_host_at_most() -> None:
    names = [each.name for each in pkgutil.iter_modules(onnxfuse.kernels.__path__) if each.ispkg]
    families = [importlib.import_module(f"onnxfuse.kernels.{name}") for name in names]
    fusions = Counter(fusion for family in families for fusion in family.FUSIONS)
    assert fusions and set(fusions.values()) == {1}
    for fusion in fusions:
        host = find_host(fusion)
        assert host is not None and callable(host.supports) and callable(host.candidates)
