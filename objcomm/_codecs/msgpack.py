"""The ``msgpack`` codec: plain data with exact types; decoding runs no code that a sender chose.

A value of a type that msgpack does not have is a list that begins with an extension naming the
type, such as ``[Tag("tuple"), 1, 2]``. User data cannot contain such an extension. A user's class
is sent under the name it was given in ``register``. Members are values: an object that occurs
twice arrives as two objects, but the memory of tied tensors stays tied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import torch

from objcomm._codecs import array_dtypes, exceptions, tensors
from objcomm._codecs.base import (
    OUT_OF_BAND_FROM_NBYTES,
    Encoded,
    blame,
    is_iterator,
    reason_of,
    refusal,
)
from objcomm._codecs.buffers import Buffer, BufferKind, view
from objcomm._codecs.nesting import Budget, Spread, check_nesting, weight_of
from objcomm._codecs.types import (
    CONSTRUCTORS,
    LOWER,
    check_attributes,
    classes,
    raise_exception,
    set_attributes,
)
from objcomm._config import decoding_settings, settings
from objcomm.errors import DecodeError, ForbiddenTypeError, shown

_NAME = "msgpack"
_TAG_CODE = 1
_AS_DATETIME = 3  # for msgpack's own timestamp extension, which calls no hook
_TEXT_ERRORS = "surrogatepass"  # for strings from os.fsdecode with undecodable file names
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1  # the range of msgpack's own integers

# The shape and dtype of a tensor or an array are nested deeper in the stream than in the object.
_DESCRIPTION_DEPTH = 8

# Lists of only these types are passed to msgpack's C code unchanged.
_NATIVE = frozenset({type(None), bool, int, float, str})
# Nobody can choose the hashes of these, so a mapping with such keys costs only its length.
_NATIVE_KEYS = frozenset({str, bytes})


class _Tag(str):
    """The head of an extended value on the receiver; never a received string."""

    __slots__ = ()


class _RefusedError(TypeError):
    """There is no rule for a value; the message is for the user."""


class MsgpackCodec:
    """See the module docstring."""

    name = _NAME

    def encode(self, obj: object, *, device_type: str | None = None) -> Encoded:
        """Encode plain data; an error names the path of a member with an unregistered type."""
        try:
            return _Encoder(device_type).encode(obj)
        except Exception as error:
            path, culprit = blame(obj, _can_encode)
            if isinstance(error, _RefusedError):  # its message says everything
                raise refusal(_NAME, path, culprit, str(error)) from None
            raise refusal(_NAME, path, culprit, reason_of(error)) from error

    def decode(
        self, meta: memoryview, buffers: Sequence[Any], *, device: torch.device | None = None
    ) -> Any:
        """Rebuild plain data; calls only functions passed to ``register`` on this rank."""
        with tensors.landing(device):
            return _Decoder(meta, buffers).decode()


def _can_encode(obj: object) -> bool:
    try:
        _Encoder(None).encode(obj)
    except Exception:  # noqa: BLE001  # the question is only whether; the caller reports it
        return False
    return True


class _Encoder:
    """Converts an object to types that msgpack can pack, and collects buffers on the way."""

    def __init__(self, device_type: str | None) -> None:
        self._device_type = device_type
        self._max_depth = settings().max_depth
        self._depth = 0
        self._buffers: list[Buffer] = []
        # Instances of classes, and exceptions, numbered in the order in which they are finished.
        self._made: dict[int, tuple[int, object]] = {}
        self._positions: dict[tuple[Any, ...], int] = {}
        self._sources: list[torch.Tensor] = []  # keeps their addresses from being reused

    def encode(self, obj: object) -> Encoded:
        lowered = self._lower(obj)
        meta = msgpack.packb(lowered, strict_types=True, unicode_errors=_TEXT_ERRORS)
        return Encoded(meta, self._buffers)

    def _lower(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _NATIVE:
            return _lower_int(obj) if kind is int else obj
        self._depth += 1
        if self._depth > self._max_depth:
            raise _RefusedError(
                f"it is nested deeper than {self._max_depth}; see objcomm.configure(max_depth=)"
            )
        lowered = self._lower_member(kind, obj)
        self._depth -= 1
        return lowered

    def _lower_member(self, kind: type, obj: Any) -> Any:
        lower = _LOWER_BY_TYPE.get(kind)
        if lower is not None:
            return lower(self, obj)
        rule = LOWER.get(kind)
        if rule is not None:
            return _extended(rule[0], *[self._lower(member) for member in rule[1](obj)])
        return self._lower_other(obj)

    def _lower_list(self, members: list[Any]) -> list[Any]:
        is_native = _NATIVE.issuperset(map(type, members)) and _all_fit(members)
        return members if is_native else [self._lower(member) for member in members]

    def _lower_bytes(self, content: bytes | bytearray) -> Any:
        if type(content) is bytes and len(content) < OUT_OF_BAND_FROM_NBYTES:
            return content
        made = BufferKind.BYTES if type(content) is bytes else BufferKind.BYTEARRAY
        locked = memoryview(content)  # keeps a bytearray from being resized
        return _extended("buffer", self._buffer(Buffer(made, locked, view(locked))))

    def _lower_dict(self, mapping: dict[Any, Any]) -> Any:
        if _NATIVE_KEYS.issuperset(map(type, mapping)):
            return {key: self._lower(value) for key, value in mapping.items()}
        pairs = (self._lower(member) for pair in mapping.items() for member in pair)
        return _extended("dict", *pairs)

    def _lower_other(self, obj: Any) -> Any:
        if tensors.is_plain_tensor(obj):
            about, flat = tensors.describe(obj, self._device_type)
            kind = BufferKind.TENSOR if flat.device.type == "cpu" else BufferKind.DEVICE
            position = self._buffer(Buffer(kind, flat, flat), obj)
            return self._with_attributes(obj, _extended("tensor", position, *map(_listed, about)))
        if tensors.is_coo_tensor(obj):
            parts = map(self._lower, tensors.describe_coo(obj))
            return self._with_attributes(obj, _extended("sparse", *parts))
        if isinstance(obj, torch.Tensor):
            raise _RefusedError(
                "a tensor of this class or layout is not plain data; send its parts, or use "
                "codec='pickle'"
            )
        if tensors.is_plain_array(obj):
            order, flat, owner = tensors.describe_array(obj)
            position = self._buffer(Buffer(BufferKind.TENSOR, owner, flat))
            dtype = array_dtypes.array_dtype_name(obj.dtype)
            return _extended("ndarray", position, dtype, list(obj.shape), order)
        if ("numpy", "generic") in map(_path_of, type(obj).__mro__):
            return _extended("scalar", array_dtypes.array_dtype_name(obj.dtype), obj.tobytes())
        if type(obj).__module__ == "numpy.dtypes":
            return _extended("dtype", array_dtypes.array_dtype_name(obj))
        return self._lower_object(obj)

    def _with_attributes(self, tensor: torch.Tensor, lowered: Any) -> Any:
        attributes = vars(tensor)
        if not attributes:
            return lowered
        if own := [name for name in attributes if hasattr(torch.Tensor, name)]:
            raise _RefusedError(f"its {own[0]!r} is set, which every tensor has; delete it")
        return _extended("attributes", lowered, self._lower(attributes))

    def _lower_object(self, obj: Any) -> Any:
        name = type(obj).__name__
        entry = classes.by_class(type(obj))
        rest: tuple[Any, ...] = None, {}, {}, None
        if entry is not None:
            lowered = _extended("object", entry.name, self._lower(entry.encode(obj)))
            if isinstance(obj, BaseException):
                given = exceptions.take_apart(obj)[1:3] if entry.is_derived else (None, {})
                rest = *given, {}, exceptions.links_of(obj)
        elif exceptions.BUILTIN_ERRORS.get(name) is type(obj):
            made_of, args, fields, attributes, links = exceptions.take_apart(obj)
            attributes = {**attributes}
            parts = name, made_of, attributes.pop("__notes__", []), str(obj)
            lowered = _extended("exception", *map(self._lower, parts))
            rest = args, fields, attributes, links
        elif is_iterator(obj):
            raise _RefusedError("it yields items, and is not plain data")
        else:
            raise _RefusedError(
                "its class is not registered; use objcomm.register(cls), or codec='pickle'"
            )
        if any(rest):
            lowered += self._lower_rest(obj, *rest)
        self._made[id(obj)] = len(self._made), obj
        return lowered

    def _lower_rest(
        self, error: Any, args: Any, fields: dict[str, Any], attributes: dict[str, Any], links: Any
    ) -> list[Any]:
        """Lower the parts of an exception that creating it does not set."""
        if fields and isinstance(error, exceptions.FIXED):
            raise _RefusedError(
                f"its {min(fields)!r} was changed after it was made; use codec='pickle'"
            )
        if own := [name for name in attributes if name.startswith("__")]:
            raise _RefusedError(f"its {own[0]!r} is set, which only Python sets; delete it")
        lowered = [self._lower(args), self._lower(fields), self._lower(attributes)]
        if links is None:
            return [*lowered, None]
        self._depth += 1
        linked = [self._lower_link(each) for each in links[:2]]
        self._depth -= 1
        return [*lowered, [*linked, links[2]]]

    def _lower_link(self, error: BaseException | None) -> Any:
        """Lower an exception, or its number if it was lowered before.

        An exception raised from another has that one as both cause and context, and often as an
        argument. The other one is then lowered only once.
        """
        number, _ = self._made.get(id(error), (None, None))
        return self._lower(error) if number is None else number

    def _buffer(self, buffer: Buffer, source: torch.Tensor | None = None) -> int:
        """Return the position of a buffer; members with exactly the same bytes share one."""
        new = len(self._buffers)
        of = buffer.flat if source is None else source
        key = tensors.memory_key(of, buffer.flat)
        position = self._positions.setdefault((buffer.kind, key or new), new)
        if position == new:
            self._buffers.append(buffer)
            self._sources.append(of)
        return position


# Functions instead of bound methods: an object that holds its own bound methods refers to itself,
# and only the garbage collector would free what it holds, such as the caller's tensors.
_LOWER_BY_TYPE: dict[type, Callable[[_Encoder, Any], Any]] = {
    list: _Encoder._lower_list,  # noqa: SLF001  # part of that class, which must exist first
    dict: _Encoder._lower_dict,  # noqa: SLF001  # as above
    bytes: _Encoder._lower_bytes,  # noqa: SLF001  # as above
    bytearray: _Encoder._lower_bytes,  # noqa: SLF001  # as above
}


def _path_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__name__


def _lower_int(value: int) -> Any:
    return value if _INT_MIN <= value <= _INT_MAX else _extended("int", hex(value))


def _extended(name: str, *members: Any) -> list[Any]:
    return [msgpack.ExtType(_TAG_CODE, name.encode()), *members]


def _all_fit(members: Any) -> bool:
    return all(_INT_MIN <= member <= _INT_MAX for member in members if type(member) is int)


def _listed(field: Any) -> Any:
    return list(field) if isinstance(field, tuple) else field


class _Decoder:
    """Rebuilds one object; every received name is looked up in a table of this process."""

    def __init__(self, meta: memoryview, buffers: Sequence[Any]) -> None:
        self._meta = meta
        self._buffers = buffers
        self._budget = Budget(_NAME, meta, buffers)
        self._made: list[Any] = []  # in the encoder's order
        self._heads = 0  # extensions read whose lists are not complete yet

    def decode(self) -> Any:
        check_nesting(self._meta, decoding_settings().max_depth, _DESCRIPTION_DEPTH)
        decoded = msgpack.unpackb(
            self._meta,
            unicode_errors=_TEXT_ERRORS,
            ext_hook=self._raise_tag,
            timestamp=_AS_DATETIME,
            list_hook=self._raise_list,
        )
        if self._heads:
            raise DecodeError(_NAME, "an extension is not at the start of a list")
        return decoded

    def _raise_tag(self, code: int, name: bytes) -> _Tag:
        if code != _TAG_CODE:
            raise DecodeError(_NAME, f"unknown extension {code}")
        self._heads += 1
        return _Tag(name, "ascii")

    def _raise_list(self, members: list[Any]) -> Any:
        if members and type(members[0]) is _Tag:
            self._heads -= 1
            name = members[0]
            rule = _RAISE.get(name)
            if rule is not None:
                return rule(self, *members[1:])
            constructor = CONSTRUCTORS.get(name)
            if constructor is None:
                raise DecodeError(_NAME, f"no rule for {name!r}; is the sender newer?")
            return constructor(*members[1:])
        return members

    def _at(self, position: Any) -> Any:
        if type(position) is not int or not 0 <= position < len(self._buffers):
            raise DecodeError(_NAME, f"the number of a buffer is {shown(position)}")
        return self._buffers[position]

    def _raise_buffer(self, position: Any) -> Any:
        buffer = self._at(position)
        if not isinstance(buffer, (bytes, bytearray)):
            raise DecodeError(_NAME, f"buffer {position} holds no bytes")
        return buffer

    def _raise_flat(self, position: Any) -> torch.Tensor:
        flat = self._at(position)
        if not isinstance(flat, torch.Tensor):
            raise DecodeError(_NAME, f"buffer {position} holds no tensor")
        return flat

    def _raise_tensor(self, position: Any, *about: Any) -> torch.Tensor:
        fields = [tuple(field) if type(field) is list else field for field in about]
        return tensors.rebuild(tensors.Dense._make(fields), self._raise_flat(position))

    def _raise_sparse(
        self, indices: Any, values: Any, shape: Any, is_coalesced: Any, requires_grad: Any
    ) -> torch.Tensor:
        self._budget.spend(tensors.numel_of(indices) + tensors.numel_of(values))
        return tensors.rebuild_coo(indices, values, shape, is_coalesced, requires_grad)

    def _raise_array(self, position: Any, dtype: Any, shape: Any, order: Any) -> Any:
        flat = self._raise_flat(position)
        if type(shape) is not list:
            raise DecodeError(_NAME, "the shape of an array is not a list")
        named = array_dtypes.array_dtype_named(dtype)
        return tensors.rebuild_array(flat, named, tuple(shape), order)

    def _raise_dict(self, *members: Any) -> dict[Any, Any]:
        Spread(self._budget, weight_of).add(members[::2])
        return dict(zip(members[::2], members[1::2], strict=True))

    def _raise_set(self, *members: Any) -> set[Any]:
        Spread(self._budget, weight_of).add(members)
        return set(members)

    def _raise_frozenset(self, *members: Any) -> frozenset[Any]:
        Spread(self._budget, weight_of).add(members)
        return frozenset(members)

    def _raise_exception(self, name: Any, args: Any, notes: Any, text: Any, *rest: Any) -> Any:
        return self._completed(raise_exception(name, args, notes, text), *rest)

    def _completed(self, made: Any, *rest: Any) -> Any:
        """Set the parts of an exception that creating it does not set, and number it."""
        if rest:
            *others, links = rest
            if type(links) is list:
                links = tuple(map(self._linked, links))
            rest = *others, links
            exceptions.check_parts(made, rest)
            check_attributes(rest[2])
            exceptions.complete(made, rest)
        self._made.append(made)
        return made

    def _linked(self, link: Any) -> Any:
        if type(link) is not int:
            return link
        if not 0 <= link < len(self._made):
            raise DecodeError(_NAME, f"the number of an exception is {shown(link)}")
        return self._made[link]

    def _raise_object(self, name: Any, state: Any, *rest: Any) -> Any:
        if type(name) is not str:
            raise DecodeError(_NAME, f"the name of an object's class is {shown(name)}")
        entry = classes.by_name(name)
        if entry is None:
            raise ForbiddenTypeError(
                _NAME, f"class {shown(name)} is not registered on this rank; use objcomm.register"
            )
        return self._completed(entry.decode(state), *rest)


# Functions instead of bound methods; see ``_LOWER_BY_TYPE``.
_RAISE: dict[str, Callable[..., Any]] = {
    "tuple": lambda _, *members: members,
    "buffer": _Decoder._raise_buffer,  # noqa: SLF001  # part of that class
    "tensor": _Decoder._raise_tensor,  # noqa: SLF001  # as above
    "attributes": lambda _, tensor, attributes: set_attributes(tensor, attributes),
    "sparse": _Decoder._raise_sparse,  # noqa: SLF001  # as above
    "ndarray": _Decoder._raise_array,  # noqa: SLF001  # as above
    "dict": _Decoder._raise_dict,  # noqa: SLF001  # as above
    "set": _Decoder._raise_set,  # noqa: SLF001  # as above
    "frozenset": _Decoder._raise_frozenset,  # noqa: SLF001  # as above
    "object": _Decoder._raise_object,  # noqa: SLF001  # as above
    "scalar": lambda _, dtype, raw: tensors.rebuild_scalar(
        array_dtypes.array_dtype_named(dtype), raw
    ),
    "dtype": lambda _, name: array_dtypes.array_dtype_named(name),
    "exception": _Decoder._raise_exception,  # noqa: SLF001  # as above
}
