"""The keywords that many operations take, for their signatures."""

from collections.abc import Iterable
from typing import TypedDict

from objcomm.config import Allowed
from objcomm.group import Timeout
from objcomm.memory import DeviceLike
from objcomm.world import GroupLike

__all__ = ["Options", "ShownOptions"]


class Options(TypedDict, total=False):
    """The keywords that every operation on objects takes; see ``objcomm.broadcast``."""

    group: GroupLike
    timeout: Timeout
    codec: str | None
    device: DeviceLike
    confirm: bool
    accept: Iterable[str] | None
    allow: Iterable[Allowed] | None


class ShownOptions(Options, total=False):
    """The same where a bar can show how far the transfer has come."""

    progress: bool
