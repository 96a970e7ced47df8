"""The ``fail_together`` blocks that a call stands in, innermost last."""

from contextvars import ContextVar

#: Each block's key in the store, where the first rank that fails in it posts its verdict.
regions: ContextVar[tuple[str, ...]] = ContextVar("objcomm_regions", default=())
