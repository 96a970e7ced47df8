"""The options that hold where a call does not say otherwise, in a scope."""

import os
from collections.abc import Iterable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType

from objcomm.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """All options.

    Attributes:
        codec: what encodes objects.
        max_nbytes: the most that one message may make a rank allocate; ``None`` means the
            machine's physical memory.
        accept: codecs whose messages this rank decodes; ``None`` means all.
        record_folder: where a rank writes its last calls when ranks lose each other; ``None``
            means that the environment says.
    """

    codec: str = "pickle"
    max_nbytes: int | None = None
    accept: frozenset[str] | None = None
    record_folder: str | None = None


_DEFAULTS = Settings()
_settings: ContextVar[Settings] = ContextVar("objcomm_settings", default=_DEFAULTS)


def settings() -> Settings:
    """The options in force here."""
    return _settings.get()


class configure:  # noqa: N801  # used as a function and as a context
    """Set options for all that follows in this thread or task, or for a ``with`` block.

    Args:
        codec: name of the codec that encodes objects; a receiver takes it from the message. As it
            was if None.
        max_nbytes: the most that one message may make a rank allocate. As it was if None.
        accept: names of the codecs whose messages this rank decodes; any other is refused unread,
            with a DecodeError. As it was if None.
        record_folder: where each rank writes its last calls when ranks lose each other; see
            ``objcomm.recorder``. As it was if None, which at first means the environment's
            OBJCOMM_RECORD_FOLDER; ``""`` means nowhere.

    Raises:
        UsageError: a limit that no message can keep.

    Example:
        >>> import objcomm
        >>> with objcomm.configure(codec="msgpack"):
        ...     nbytes = objcomm.to_tensor([1, 2, 3]).numel()
    """

    def __init__(
        self,
        *,
        codec: str | None = None,
        max_nbytes: int | None = None,
        accept: Iterable[str] | None = None,
        record_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_nbytes is not None and max_nbytes <= 0:
            raise UsageError(f"max_nbytes={max_nbytes} leaves no room for any message")
        before = settings()
        names = [accept] if isinstance(accept, str) else accept or ()
        self._token: Token[Settings] | None = _settings.set(
            Settings(
                codec or before.codec,
                max_nbytes or before.max_nbytes,
                before.accept if accept is None else frozenset(names),
                before.record_folder if record_folder is None else os.fspath(record_folder),
            )
        )

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._token is not None:
            _settings.reset(self._token)
            self._token = None
