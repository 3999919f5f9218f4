"""An extension of Griffe: docstrings as Markdown, with their aligned lists of parameters as lists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from griffe import Extension, Object

sys.path.append(str(Path(__file__).parent))

from aligned_lists import with_lists


class AlignedLists(Extension):
    """Rewrite the docstring of each object that is documented."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None and not getattr(obj, "is_alias", False):
            obj.docstring.value = with_lists(obj.docstring.value)
