"""BlockPool: the physical blocks. Reference counts, free order, hash index, events.

The pool knows nothing of requests or attention kinds. Its verbs are bulk: a table (``BlockList``)
is extended, released or committed as a range, and a look-up answers for a range, so that no
Python object exists per block. Block 0 is the null block: a placeholder that is never
allocated, cached or freed.

The free queue, popped front to back::

    [ never cached … | cached, dead, not useful … ]   [ the other cached ones, least recently freed first … ]
      front: prepend              back: append            back: append

Both classes are compiled (``src/native/pool.cpp``); what each verb does and costs is in ``_native.pyi``.
"""

from __future__ import annotations

from typing import Literal

from ._native import BlockList, BlockPool

__all__ = ["NULL_BLOCK", "BlockList", "BlockPool", "EvictionOrder"]

NULL_BLOCK = 0
EvictionOrder = Literal["dead_first", "recency"]
