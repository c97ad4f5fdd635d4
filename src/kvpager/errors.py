"""The exceptions of the package.

::

    KVPagerError
    ├── ConfigError          (ValueError)   a size, a mix of groups or an option that cannot work
    ├── InvalidRequestError  (ValueError)   a call that does not fit the request's state
    │   ├── DuplicateRequestError           an id that is already in use by a live request
    │   └── RequestTooLargeError            a request that could never fit, with what would
    ├── UnknownRequestError  (KeyError)     a request id the manager holds nothing for
    ├── UnknownBlockError    (IndexError)   a block id that is not in the pool
    ├── BlockStateError      (ValueError)   a block that is not in the state the call needs
    ├── OutOfBlocksError                    more blocks asked of the pool than are free
    ├── InvariantError       (AssertionError)  a broken invariant: a bug in kvpager, never the caller's
    └── TraceError           (ValueError)   an input file that does not parse, with line numbers

Every message says what came, what is allowed and what to do. When one is raised
by the manager or the pool, nothing has changed.
"""

from __future__ import annotations

__all__ = [
    "BlockStateError",
    "ConfigError",
    "DuplicateRequestError",
    "InvalidRequestError",
    "InvariantError",
    "KVPagerError",
    "OutOfBlocksError",
    "RequestTooLargeError",
    "TraceError",
    "UnknownBlockError",
    "UnknownRequestError",
]


class KVPagerError(Exception):
    """Base of everything kvpager raises on purpose."""


class ConfigError(KVPagerError, ValueError):
    """A configuration that cannot work."""


class InvalidRequestError(KVPagerError, ValueError):
    """A call that does not fit the state of the request it names."""


class DuplicateRequestError(InvalidRequestError):
    """A request id that a live request already uses."""


class RequestTooLargeError(InvalidRequestError):
    """A request that could never fit the cache.

    ``num_tokens`` is what it needs at most, ``num_tokens_that_fit`` the longest
    sequence that the cache can hold.
    """

    def __init__(self, request_id: str, num_tokens: int, num_tokens_that_fit: int) -> None:
        super().__init__(
            f"request {request_id!r} may grow to {num_tokens} tokens, but the cache holds at most "
            f"{num_tokens_that_fit} tokens of one request; shorten the prompt, lower max_tokens, "
            f"or give the cache more blocks"
        )
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.num_tokens_that_fit = num_tokens_that_fit


class UnknownRequestError(KVPagerError, KeyError):
    """A request id that the manager holds nothing for."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would print the repr


class UnknownBlockError(KVPagerError, IndexError):
    """A block id that is not in the pool."""


class BlockStateError(KVPagerError, ValueError):
    """A block that is not in the state the call needs (a double free, for instance)."""


class OutOfBlocksError(KVPagerError):
    """More blocks were asked of the pool than are free."""


class InvariantError(KVPagerError, AssertionError):
    """An invariant does not hold: both sides are in the message. A bug in kvpager."""


class TraceError(KVPagerError, ValueError):
    """A trace that does not parse: file, line numbers and what was expected are in the message."""
