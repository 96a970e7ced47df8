"""The codec interface, the registry of codecs, and the search for a member that a codec rejects.

A codec splits an object into *meta*, its own bytes, and *buffers*, the memory of large members.
Buffers are sent unchanged, from the sender's memory into memory that the receiver allocates once.
"""

import contextlib
import dataclasses
import functools
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from objcomm._codecs.buffers import Buffer, duplicate
from objcomm._config import Settings, decoding, decoding_settings, settings
from objcomm.errors import DecodeError, EncodeError, UsageError, name_of, not_accepted, text_of

if TYPE_CHECKING:
    from objcomm._codecs.places import Place

#: Members of this size or larger are moved out of a codec's bytes and become buffers.
OUT_OF_BAND_FROM_NBYTES = 64 * 1024

_NAME_MAX_NBYTES = 16  # size of the header's field


class Encoded(NamedTuple):
    """One object, split into bytes and buffers.

    Attributes:
        meta: the codec's own bytes.
        buffers: memory of large members, in the order in which ``decode`` receives them.
    """

    meta: bytes | bytearray
    buffers: Sequence[Buffer] = ()


@runtime_checkable
class Codec(Protocol):
    """Converts objects to bytes and back; all threads share one instance.

    Attributes:
        name: at most 16 ASCII characters, the same on every rank. It is part of every header, so
            that a receiver knows which codec to use.
    """

    name: str

    def encode(self, obj: object, *, device_type: str | None = None) -> Encoded:
        """Split ``obj`` into bytes and buffers.

        Args:
            obj: any object. It is not modified, and must not be modified before it has been sent.
            device_type: tensors on this type of device may stay there, as
                ``BufferKind.DEVICE`` buffers; all others become CPU buffers. If a group has
                transfers for several types, this names all of them, as in ``"cuda,xpu"``.

        Raises:
            EncodeError: the codec rejects the object. Any other exception is converted to this.
        """

    def decode(
        self, meta: memoryview, buffers: Sequence[Any], *, device: torch.device | None = None
    ) -> Any:
        """Rebuild an object.

        Args:
            meta: the bytes from ``encode``.
            buffers: each buffer's ``owner``, in order.
            device: the device to place its tensors on; ``None`` keeps each tensor's device type.

        Raises:
            DecodeError: it cannot be rebuilt here. Any other exception is converted to this.
        """


class _Registry:
    """Codecs by name. Readers need no lock, because the mapping is replaced, never modified."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.codecs: dict[str, Codec] = {}

    def add(self, codec: Codec) -> None:
        with self._lock:
            self.codecs = {**self.codecs, codec.name: codec}

    def names(self) -> list[str]:
        return sorted(self.codecs)


#: The codecs of this process.
registry = _Registry()


def register_codec(codec: Codec) -> None:
    """Register a codec, so that every operation accepts ``codec=codec.name``; call on every rank.

    Args:
        codec: see ``objcomm.codecs.Codec``. It replaces a codec with the same name.

    Raises:
        UsageError: it is not a codec, or its name does not fit into a message's header.

    Examples:
        >>> import json, objcomm
        >>> from objcomm.codecs import Encoded
        >>> class Json:
        ...     name = "json"
        ...     def encode(self, obj, *, device_type=None):
        ...         return Encoded(json.dumps(obj).encode())
        ...     def decode(self, meta, buffers, *, device=None):
        ...         return json.loads(bytes(meta))
        >>> objcomm.codecs.register_codec(Json())
        >>> objcomm.from_tensor(objcomm.to_tensor({"lr": 0.1}, codec="json"))
        {'lr': 0.1}
    """
    name = getattr(codec, "name", None)
    if not (isinstance(name, str) and hasattr(codec, "encode") and hasattr(codec, "decode")):
        raise UsageError(f"register_codec: codec={codec!r} must have a name, encode and decode")
    if not (name.isascii() and name.isprintable() and 0 < len(name) <= _NAME_MAX_NBYTES):
        raise UsageError(f"a codec's name has 1 to {_NAME_MAX_NBYTES} ASCII letters, not {name!r}")
    registry.add(codec)


def codec_named(name: object, operation: str = "") -> Codec:
    """Return the codec that an operation's ``codec=`` names.

    Args:
        name: as the user passed it.
        operation: the operation that the user called, for error messages.

    Raises:
        UsageError: no codec has that name.
    """
    codec = registry.codecs.get(name) if isinstance(name, str) else None  # a list is not hashable
    if codec is None:
        prefix = f"{operation}: " if operation else ""
        raise UsageError(
            f"{prefix}codec={name!r} must be one of {', '.join(registry.names())}; register "
            "another one with objcomm.codecs.register_codec"
        )
    return codec


def encode(codec: Codec, obj: object, *, device_type: str | None = None) -> Encoded:
    """Encode with any codec; converts all its exceptions to EncodeError.

    Raises:
        EncodeError: the codec rejects the object.
    """
    try:
        encoded = codec.encode(obj, device_type=device_type)
    except EncodeError:
        raise
    except Exception as error:
        raise refusal(codec.name, "obj", obj, reason_of(error)) from error
    if not isinstance(encoded, Encoded):
        kind = name_of(type(obj), "__qualname__")
        reason = f"its encode() returned a {name_of(type(encoded))}, not an Encoded"
        raise EncodeError(codec.name, kind, "obj", reason)
    return encoded


def decode(
    name: str,
    meta: memoryview,
    buffers: Sequence[Any],
    *,
    device: torch.device | None = None,
    chosen: Settings | None = None,
) -> Any:
    """Decode a message's content with the codec it names; converts exceptions to DecodeError.

    Args:
        name: the codec's name.
        meta: the codec's own bytes.
        buffers: the buffers' owners.
        device: the device to place tensors on.
        chosen: the options to apply; if None, those in force.

    Raises:
        DecodeError: this process does not have the codec or does not accept it, or decoding failed.
    """
    chosen = chosen or decoding_settings()
    accepted = chosen.accept
    if accepted is not None and name not in accepted:
        raise not_accepted(name, accepted)
    codec = registry.codecs.get(name)
    if codec is None:
        known = ", ".join(registry.names())
        raise DecodeError(name, f"it is not registered on this rank, which has {known}")
    before, decoding.settings = decoding.settings, chosen
    try:
        return codec.decode(meta, buffers, device=device)
    except DecodeError:
        raise
    except MemoryError as error:  # there may be no memory for its text, either
        raise DecodeError(name, "there is no memory for it") from error
    except Exception as error:
        lacking = _lacking(error)
        advice = "" if lacking else _ADVICE.format(codec=name)
        find: Callable[..., Place | None] | None = getattr(codec, "place_of_failure", None)
        path, made_by = "", ""
        with contextlib.suppress(Exception):  # a key whose repr() raises
            path, made_by = (find and find(meta, buffers, device)) or ("", "")
        raise DecodeError(name, f"{text_of(error)}{advice}", lacking, path, made_by) from error
    finally:
        decoding.settings = before


# Only a sender can test whether all ranks have the same classes.
_ADVICE = (
    "; try objcomm.from_tensor(objcomm.to_tensor(obj, codec={codec!r})) on the rank that sent it: "
    "if that raises too, the class can't be rebuilt from what it gives to the codec; "
    "otherwise ranks have different versions of the class"
)


# In pickle's wording, and in Python's own.
_NO_SUCH_NAME = (
    re.compile(r"Can't get attribute '(?P<name>[^']+)' on <module '(?P<module>[^']+)'"),
    re.compile(r"module '(?P<module>[^']+)' has no attribute '(?P<name>[^']+)'"),
    re.compile(r"Can't resolve path '(?P<name>[^']+)' on module '(?P<module>[^']+)'"),
)


def _lacking(error: Exception) -> str:
    """Return the missing module, or the missing name in one, that prevented decoding, else ""."""
    if type(error) is ModuleNotFoundError:
        return error.name or ""
    if type(error) is AttributeError:
        found = next(filter(None, (each.match(str(error)) for each in _NO_SUCH_NAME)), None)
        return f"{found['module']}:{found['name']}" if found else ""
    return ""


def copy(codec: Codec, obj: object) -> Any:
    """Return an independent copy of the object, as a receiver would get it.

    Raises:
        CodecError: the codec rejects the object, or cannot rebuild it.
    """
    make: Callable[[object], Any] | None = getattr(codec, "copy", None)
    if make is not None:
        try:
            return make(obj)
        except Exception as error:
            encode(codec, obj)  # if this fails, its error names the member
            raise DecodeError(codec.name, text_of(error)) from error
    encoded = encode(codec, obj)
    owners = [duplicate(buffer).owner for buffer in encoded.buffers]
    # ``accept`` only applies to other ranks' messages.
    chosen = dataclasses.replace(settings(), accept=None)
    return decode(codec.name, memoryview(encoded.meta), owners, chosen=chosen)


def reason_of(error: Exception) -> str:
    """Return the text of an error in encoding, with advice if there is any.

    Trying again with a larger stack is not possible: Python's limit applies to all threads.
    """
    if not isinstance(error, RecursionError):
        return text_of(error)
    # With a limit of 1,000, pickle handles 996 nested tuples, 498 lists or 332 objects; msgpack 250
    # lists or more.
    levels = sys.getrecursionlimit() // 4
    return (
        f"{text_of(error)}; if it is nested deeper than about {levels} levels, flatten it, for "
        "example into a list of nodes that refer to each other by their indices"
    )


# Deeper than any path that a person would read; it also ends cycles.
_DEPTH_MAX = 32


def refusal(codec: str, path: str, culprit: object, reason: str) -> EncodeError:
    """Return the error for a rejected member, with what to send instead if that is known.

    Args:
        codec: the codec's name.
        path: path of the member.
        culprit: the member.
        reason: the codec's reason.
    """
    if is_iterator(culprit):
        reason = f"{reason}; send list({path}) instead"
    return EncodeError(codec, name_of(type(culprit), "__qualname__"), path, reason)


#: Types that yield items one by one, and the views of a dict, which can only be pickled.
_ITERATORS = (
    types.GeneratorType,
    *(type(iter(each)) for each in ([1], (1,), {1: 2}, {1}, range(1))),
    *map(type, ({1: 2}.keys(), {1: 2}.values(), {1: 2}.items())),
    *(map, filter, zip, enumerate, reversed),
)


def is_iterator(obj: object) -> bool:
    """Return whether an object is a builtin iterator or view, such as a generator or dict keys."""
    return any(type(obj) is each for each in _ITERATORS)  # does not call a metaclass


def blame(obj: object, can_encode: Callable[[object], bool]) -> tuple[str, object]:
    """Find the innermost member that cannot be encoded on its own.

    Args:
        obj: the object that was rejected as a whole.
        can_encode: whether a codec accepts one member. It is called for each member on the way, so
            this is slow and only for errors.

    Returns:
        The path of the member, such as ``obj['model'].head``, and the member.
    """
    path, culprit = "obj", obj
    for _ in range(_DEPTH_MAX):
        try:
            refused = next(
                ((step, member) for step, member in members(culprit) if not can_encode(member)),
                None,
            )
        except Exception:  # noqa: BLE001  # an attribute or repr() that raises: the path ends here
            break
        if refused is None:
            break
        path, culprit = path + refused[0], refused[1]
    return path, culprit


def members(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of ``obj``, each with the step that leads to it.

    A mapping's keys, a function's closure and an object's attributes count as members.
    """
    if isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
        yield from ((f" key {key!r}", key) for key in obj)
    elif isinstance(obj, (list, tuple)):
        names = getattr(obj, "_fields", None)
        steps = [f".{name}" for name in names] if names else [f"[{at}]" for at in range(len(obj))]
        yield from zip(steps, obj, strict=True)
    elif isinstance(obj, (set, frozenset)):
        yield from ((f" member {value!r}", value) for value in obj)
    elif getattr(getattr(obj, "dtype", None), "hasobject", False):
        yield from ((f".flat[{at}]", member) for at, member in enumerate(obj.flat))
    elif not isinstance(obj, type):
        if isinstance(obj, BaseException):
            yield from ((f".args[{at}]", member) for at, member in enumerate(obj.args))
            yield from ((".__cause__", obj.__cause__), (".__context__", obj.__context__))
        elif isinstance(obj, functools.partial):
            yield ".func", obj.func
            yield from ((f".args[{at}]", member) for at, member in enumerate(obj.args))
            yield from ((f".keywords[{name!r}]", value) for name, value in obj.keywords.items())
        yield from _attributes(obj)


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.FunctionType) and obj.__closure__:
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__, strict=True):
            yield f" closure {name!r}", cell.cell_contents
    elif dataclasses.is_dataclass(obj):
        for field in dataclasses.fields(obj):
            yield f".{field.name}", getattr(obj, field.name, None)
    else:
        for name, value in getattr(obj, "__dict__", {}).items():
            yield f".{name}", value
