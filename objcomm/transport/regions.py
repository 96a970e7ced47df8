"""The ``fail_together`` blocks that a call stands in, innermost last."""

from contextvars import ContextVar

#: Each block's key in the store, where the first rank that fails in it posts its verdict.
regions: ContextVar[tuple[str, ...]] = ContextVar("objcomm_regions", default=())


def nonce_of(block: str) -> str:
    """The name of the mesh in which a block began."""
    return block.partition("/")[0]
