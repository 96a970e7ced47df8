"""Unpickling that admits only listed classes and functions, for pickles from untrusted senders.

This is Python's unpickler with its tables replaced; the slow one, because the fast one cannot be
restricted this way. What a stream names is looked up, never imported. Only what was looked up can
be called. State can be set only on instances of an admitted class, so no class, function or enum
member of this process can be modified. A stream can reuse an object for two bytes each time, so the
work that this causes is counted.

An admitted class is responsible for what it does with arguments or state that a sender chose.
"""

import collections
import copyreg
import enum
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from objcomm._codecs import array_dtypes, exceptions, tensors
from objcomm._codecs.nesting import Budget, Spread, length_of, weight_of
from objcomm._codecs.types import (
    CONSTRUCTORS,
    check_arguments,
    check_attributes,
    member_of,
    set_attributes,
)
from objcomm.errors import DecodeError, ForbiddenTypeError, name_of

_NAME = "pickle"

# Opcodes that this package's pickler writes; the methods below handle more. Omitted are persistent
# ids, the extension registry, whose cache is consulted before ``find_class``, and obsolete opcodes.
_PLAIN_OPCODES = [
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "POP",
    "POP_MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "EMPTY_TUPLE",
    "EMPTY_LIST",
    "EMPTY_DICT",
    "EMPTY_SET",
    "MEMOIZE",
    "STACK_GLOBAL",
    "NEXT_BUFFER",
    "READONLY_BUFFER",
]


def loads(
    meta: memoryview, buffers: Sequence[Any], allow: Mapping[str, Any], max_depth: int
) -> Any:
    """Unpickle a stream that names only builtin types, tensors, arrays and ``allow``.

    Args:
        meta: the stream.
        buffers: its large members.
        allow: what else it may name, by ``module.qualname``.
        max_depth: how deep containers may be nested.

    Raises:
        ForbiddenTypeError: it names anything else, or would modify an object that it did not
            create.
        DecodeError: it is nested too deep. Any other exception is an error in the stream or in an
            admitted class.
    """
    unpickler = _Unpickler(meta, buffers, allow, max_depth)
    found = unpickler.load()
    unpickler.check_depth(found)
    return found


_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001  # see the module docstring

_STEPS_MAX = 1 << 62
_BITS_PER_STEP = 1 << 10
_WALKED_MAX = 1_000
_STEPS_PER_FIELD = 20  # fields of a dtype


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]  # its members have no types
    dispatch: ClassVar[dict[int, Callable[[Any], None]]]

    def __init__(
        self, meta: memoryview, buffers: Sequence[Any], allow: Mapping[str, Any], max_depth: int
    ) -> None:
        super().__init__(io.BytesIO(meta), buffers=buffers)
        self._nbytes = len(meta)
        self._admitted = {**_TOOLS, **allow}
        self._callable = {id(each) for each in self._admitted.values()}
        self._classes = {each for each in allow.values() if isinstance(each, type)}
        self._classes.add(collections.OrderedDict)
        self._tools = {id(each) for each in (*_TOOLS.values(), *_CALLED.values())}
        self._budget = Budget(_NAME, meta, buffers)
        self._max_depth = max_depth
        # For each container: its depth, and the number of members met when walking through it,
        # counting a member each time it occurs.
        self._extents: dict[int, tuple[int, int]] = {}
        self._alive: list[Any] = []  # keeps ids in ``_extents`` from being reused
        self._held: set[int] = set()  # members of other objects that may still grow
        self._has_grown_late = False
        self._spreads: dict[int, Spread] = {}
        self._fetched: dict[tuple[int, int], int] = {}  # ids of memoized objects, by stack position

    def check_depth(self, found: Any) -> None:
        """Check the depth of ``found`` again if anything grew after it became a member.

        That happens in cycles, such as a child that refers to its parent.

        Raises:
            DecodeError: it is nested too deep.
        """
        if not self._has_grown_late:
            return
        depths: dict[int, int] = {}  # depths of objects already checked, by id
        path: list[tuple[Any, Iterator[Any], int]] = [(found, _members_of(found), 0)]
        under_way = {id(found)}
        while path:
            if len(path) > self._max_depth + 1:
                raise self._too_deep()
            each, members, depth = path.pop()
            for member in members:
                if id(member) in under_way:  # a cycle
                    continue
                known = depths.get(id(member))
                if known is None:
                    path += [(each, members, depth), (member, _members_of(member), 0)]
                    under_way.add(id(member))
                    break
                depth = max(depth, known)
            else:
                under_way.discard(id(each))
                depths[id(each)] = depth + (type(each) not in _SCALARS)
                if depths[id(each)] + len(path) > self._max_depth:
                    raise self._too_deep()
                if path:
                    outer, rest, reached = path.pop()
                    path.append((outer, rest, max(reached, depths[id(each)])))

    def _too_deep(self) -> DecodeError:
        return DecodeError(
            _NAME, f"it is nested deeper than {self._max_depth}; see objcomm.configure(max_depth=)"
        )

    def find_class(self, module: str, name: str) -> Any:
        """Return what a stream names; a dotted name must be listed as a whole."""
        found = self._admitted.get(f"{module}.{name}")
        if found is None:
            raise ForbiddenTypeError(
                _NAME, f"'{module}.{name}' is not allowed; add it to allow= to permit it"
            )
        return found

    def _nest(self, made: Any, *parts: Any) -> Any:
        """Record the depth of ``made``, so that recursive code never meets anything too deep."""
        extents = self._extents
        depth, steps = 0, 0
        for part in parts:
            if type(part) in _GROWING or type(part) in self._classes:
                self._held.add(id(part))
            known = extents.get(id(part))
            if known is None:
                steps += 1 if type(part) is not int else self._steps(part)
            else:
                depth, steps = max(depth, known[0]), steps + known[1]
        depth += 1
        if depth > self._max_depth:
            raise self._too_deep()
        if made is not None:
            before = extents.get(id(made))
            if before is None:
                self._alive.append(made)
                before = 1, 1
            extents[id(made)] = max(depth, before[0]), min(steps + before[1], _STEPS_MAX)
        return made

    def _steps(self, given: Any) -> int:
        """Return the number of steps to walk through an object."""
        known = self._extents.get(id(given))
        if known is not None:
            return known[1]
        if type(given) is int:  # its hash is computed each time it is used
            return 1 + given.bit_length() // _BITS_PER_STEP
        return len(given) if type(given) in {str, bytes, bytearray} else 1

    def _weight(self, member: Any) -> int:
        """Return the steps to compare a member of a set; one with many steps is not walked."""
        steps = self._steps(member)
        return steps if steps > _WALKED_MAX else weight_of(member) + steps

    def _called(self, function: Any, arguments: Any, options: Mapping[str, Any]) -> None:
        if type(arguments) is not tuple:
            raise DecodeError(_NAME, "the arguments of a call are not a tuple")
        parts = (*arguments, *options.values())
        # An admitted class is responsible for its arguments, but many walk through them, and a
        # range of 20 bytes may have any length.
        steps = len(parts) + sum(length_of(each) for each in parts if type(each) is range)
        if id(function) in self._tools:
            weight = _STEPS_PER_FIELD if function is array_dtypes.array_dtype_named else 1
            walked = parts[1:] if function is _array else parts  # memory is often shared
            steps += weight * sum(map(self._steps, walked))
            steps += sum(map(tensors.numel_of, parts)) if function is tensors.rebuild_coo else 0
        self._budget.spend(steps)
        self.append(self._nest(function(*arguments, **options), *parts))

    def _look_up(self, cls: enum.EnumMeta, arguments: Any) -> None:
        """Push the member of an enum class that has the given value."""
        if type(arguments) is not tuple or len(arguments) != 1:
            raise DecodeError(_NAME, f"a {cls.__name__} is not built from one value")
        self._budget.spend(1 + self._steps(arguments[0]))
        if not self._is_value(arguments[0]):  # an error would show it, up to gigabytes
            kind = name_of(type(arguments[0]))
            raise DecodeError(_NAME, f"the value of a {cls.__name__} is a {kind}, which is refused")
        self.append(self._nest(member_of(cls, arguments[0]), arguments[0]))

    def _is_value(self, given: Any) -> bool:
        kind = type(given)
        if kind in {tuple, frozenset}:
            return all(map(self._is_value, given))
        is_listed = kind in self._classes or id(given) in self._callable
        return is_listed or kind in _SCALARS or kind in {torch.dtype, torch.device}

    def _make(self, cls: Any, arguments: Any, options: Mapping[str, Any]) -> None:
        is_own = isinstance(cls, type) and cls in self._classes and cls not in _CALLED
        if not is_own or isinstance(cls, enum.EnumMeta):  # enum members are looked up
            raise ForbiddenTypeError(_NAME, f"a {type(cls).__name__} is constructed like a class")
        self._called(lambda *given, **named: cls.__new__(cls, *given, **named), arguments, options)

    def _target(self, *usual: type) -> Any:
        """Return the object that members are added to: of a ``usual`` type, or an admitted class.

        Others are refused: an array would read members from any object that gives a memory address.
        """
        target = self.stack[-1]
        self._check_may_grow(target, *usual)
        if self._fetched.get((len(self.metastack), len(self.stack))) == id(target):
            # Its container would become deeper without being checked.
            raise DecodeError(
                _NAME, "members are added to an object that already belongs to another one"
            )
        return target

    def _check_may_grow(self, target: Any, *usual: type) -> None:
        self._has_grown_late |= id(target) in self._held
        kind = type(target)
        is_named = id(target) in self._callable or isinstance(target, enum.Enum)
        if is_named or (kind not in usual and kind not in self._classes):
            raise ForbiddenTypeError(_NAME, f"members are added to a {name_of(kind)}")

    def _get(self, position: int) -> None:
        """Push a memoized object; an object under construction is never at that position."""
        self.append(self.memo[position])
        self._fetched[len(self.metastack), len(self.stack)] = id(self.stack[-1])

    def load_binget(self) -> None:
        self._get(self.read(1)[0])

    def load_long_binget(self) -> None:
        self._get(int.from_bytes(self.read(4), "little"))

    def _hashed(self, target: Any, members: Sequence[Any]) -> None:
        """Count the steps to use ``members`` as keys of ``target``, or as members of a set."""
        # The hash of a tuple is computed from all of its members each time.
        self._budget.spend(sum(map(self._steps, members)))
        spread = self._spreads.get(id(target))
        if spread is None:
            spread = self._spreads[id(target)] = Spread(self._budget, self._weight)
        spread.add(members)

    def load_tuple(self) -> None:
        members = self.pop_mark()
        self.append(self._nest(tuple(members), *members))

    def load_tuple1(self) -> None:
        self._take_last(1)

    def load_tuple2(self) -> None:
        self._take_last(2)

    def load_tuple3(self) -> None:
        self._take_last(3)

    def _take_last(self, count: int) -> None:
        members = tuple(self.stack[-count:])
        self.stack[-count:] = [self._nest(members, *members)]

    def load_frozenset(self) -> None:
        members = self.pop_mark()
        self._budget.spend(sum(map(self._steps, members)))
        spread = Spread(self._budget, self._weight)
        spread.add(members)
        made = self._nest(frozenset(members), *members)
        depth, steps = self._extents[id(made)]
        self._extents[id(made)] = depth, min(steps + spread.spent, _STEPS_MAX)
        self.append(made)

    def load_append(self) -> None:
        member = self.stack.pop()
        self._nest(self._target(list), member).append(member)

    def load_appends(self) -> None:
        members = self.pop_mark()
        self._nest(self._target(list), *members).extend(members)

    def load_additems(self) -> None:
        members = self.pop_mark()
        target = self._nest(self._target(set), *members)
        self._hashed(target, members)
        for member in members:
            target.add(member)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        target = self._nest(self._target(dict), key, value)
        self._hashed(target, (key,))
        target[key] = value

    def load_setitems(self) -> None:
        members = self.pop_mark()
        target = self._nest(self._target(dict), *members)
        self._hashed(target, members[::2])
        for at in range(0, len(members), 2):
            target[members[at]] = members[at + 1]

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if id(function) not in self._callable:
            raise ForbiddenTypeError(_NAME, f"a {type(function).__name__} is called")
        if function is _set_state:  # instead of BUILD, for a class with a ``__getattr__``
            if type(arguments) is not tuple or len(arguments) != 2:  # noqa: PLR2004  # see there
                raise DecodeError(_NAME, "a state is applied to something that is not an object")
            self._build(*arguments)
            self.append(None)
            return
        if isinstance(function, enum.EnumMeta):
            self._look_up(function, arguments)
            return
        is_class = isinstance(function, type)
        self._called(_CALLED.get(function, function) if is_class else function, arguments, {})

    def load_newobj(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        self._make(cls, arguments, {})

    def load_newobj_ex(self) -> None:
        options, arguments, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._make(cls, arguments, options)

    def load_build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) in self._classes:
            self._target()
        self._build(self.stack[-1], state)

    def _build(self, target: Any, state: Any) -> None:
        kind = type(target)
        if kind not in self._classes:
            raise ForbiddenTypeError(
                _NAME, f"a {kind.__name__} is given a state, but its class is not in allow="
            )
        self._check_may_grow(target)
        self._nest(target, state)
        self._budget.spend(len(state) if type(state) in {dict, tuple} else 1)
        if hasattr(kind, "__setstate__"):
            target.__setstate__(state)
            return
        slots: dict[str, Any] = {}
        if type(state) is tuple and len(state) == 2:  # noqa: PLR2004  # (state, slots), as pickle
            state, slots = state
        state, slots = state or {}, slots or {}
        for each in (state, slots):
            if type(each) is not dict or not all(type(name) is str for name in each):
                raise DecodeError(_NAME, f"the state of a {kind.__name__} has no names")
        check_attributes(state)
        if kind is collections.OrderedDict and any(hasattr(kind, name) for name in state | slots):
            raise ForbiddenTypeError(_NAME, "an OrderedDict's own methods are set")
        vars(target).update(state)
        for name, value in slots.items():
            if name.startswith("__") and name.endswith("__"):
                raise ForbiddenTypeError(_NAME, f"the state of a {kind.__name__} sets {name!r}")
            object.__setattr__(target, name, value)

    def load_bytearray8(self) -> None:
        nbytes = int.from_bytes(self.read(8), "little")
        if nbytes > self._nbytes:
            raise DecodeError(_NAME, f"it announces a bytearray of {nbytes} bytes")
        self.append(bytearray(self.read(nbytes)))


_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_GROWING = frozenset({list, dict, set, collections.OrderedDict})


def _members_of(each: Any) -> Iterator[Any]:
    """Yield the members met when walking through ``each``."""
    kind = type(each)
    if kind in _SCALARS:
        return
    if issubclass(kind, (list, tuple, set, frozenset, collections.deque)):
        yield from each
    elif kind is slice:
        yield from (each.start, each.stop, each.step)
    elif issubclass(kind, dict):
        yield from each.keys()
        yield from each.values()
    state = getattr(each, "__dict__", None)
    if type(state) is dict:
        yield from state.values()
    for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]  # noqa: SLF001  # as pickle does
        yield getattr(each, name, None)


def _check_memory(flat: Any) -> None:
    if type(flat) is bytearray:
        return
    # Another tensor might be expanded, and take gigabytes when it is moved to a device.
    if not (tensors.is_plain_tensor(flat) and flat.dtype is torch.uint8 and flat.dim() == 1):
        raise DecodeError(
            _NAME, f"a {name_of(type(flat))} is not the memory of a tensor or an array"
        )
    if not flat.is_contiguous():
        raise DecodeError(_NAME, "the memory of a tensor or an array is not in one piece")


def _tensor(about: Any, flat: Any) -> torch.Tensor:
    if type(about) is not tuple:
        raise DecodeError(_NAME, "a tensor is not built from a description and memory")
    _check_memory(flat)
    return tensors.rebuild(tensors.Dense(*about), flat)


def _array(flat: Any, *about: Any) -> Any:
    _check_memory(flat)
    return tensors.rebuild_array(flat, *about)


def _scalar(dtype: Any, raw: Any) -> Any:
    import numpy as np  # noqa: PLC0415  # numpy is optional

    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise DecodeError(_NAME, "a numpy scalar is not built from a dtype and bytes")
    return tensors.rebuild_scalar(dtype, raw)


def _exception(kind: Any, made_of: Any) -> BaseException:
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise ForbiddenTypeError(_NAME, f"a {name_of(type(kind))} is constructed like a class")
    if type(made_of) is not tuple:
        raise DecodeError(_NAME, "an exception's arguments are not a tuple")
    check_arguments(kind, made_of)
    return exceptions.make(kind, made_of)


def _complete(error: Any, rest: Any) -> Any:
    if type(rest) is not tuple:
        raise DecodeError(_NAME, "these parts do not complete an exception")
    exceptions.check_parts(error, rest)
    check_attributes(rest[2])
    exceptions.complete(error, rest)
    return error


def _complete_with_state(error: Any, rest: Any) -> Any:
    if not isinstance(error, BaseException) or type(rest) is not tuple or len(rest) != 3:  # noqa: PLR2004  # as the pickler
        raise DecodeError(_NAME, "these parts do not complete an exception")
    state, notes, links = rest
    exceptions.check_parts(error, (None, {}, {} if notes is None else {"__notes__": notes}, links))
    if type(state) is dict:
        check_attributes(state)
    exceptions.complete_with_state(error, rest)
    return error


def _sizes(sizes: Any) -> Any:
    if type(sizes) is not tuple:  # torch.Size would iterate over a range
        raise DecodeError(_NAME, "a torch.Size is not built from a tuple")
    return CONSTRUCTORS["torch.Size"](*sizes)


def _ordered() -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict()


def _same(buffer: Any) -> Any:
    return buffer


def _set_state(obj: Any, state: Any) -> None:
    """Mark a call that ``load_reduce`` handles: ``allow=`` decides whose state may be set."""


#: What every stream may name, by the name used there.
_TOOLS: dict[str, Any] = {
    **{f"builtins.{each.__name__}": each for each in (complex, range, slice)},
    "builtins.Ellipsis": ...,
    "builtins.NotImplemented": NotImplemented,
    "collections.OrderedDict": collections.OrderedDict,
    "torch.device": torch.device,
    "torch.Size": torch.Size,
    **{str(each): each for each in tensors.DTYPES.values()},
    "objcomm._codecs.array_dtypes.array_dtype_named": array_dtypes.array_dtype_named,
    "objcomm._codecs.tensors.array_dtype_named": array_dtypes.array_dtype_named,
    "objcomm._codecs.tensors.rebuild_array": _array,
    "objcomm._codecs.tensors.rebuild_coo": tensors.rebuild_coo,
    "objcomm._codecs.exceptions.make": _exception,
    "objcomm._codecs.exceptions.complete": _complete,
    "objcomm._codecs.exceptions.complete_with_state": _complete_with_state,
    "objcomm._codecs.pickle5._rebuild_tensor": _tensor,
    "objcomm._codecs.pickle5._same": _same,
    "objcomm._codecs.pickle5._set_attributes": set_attributes,
    "objcomm._codecs.pickle5._set_state": _set_state,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray.scalar": _scalar,
}

#: What is called instead of a class that every stream may name.
_CALLED: dict[type, Callable[..., Any]] = {
    complex: CONSTRUCTORS["complex"],
    range: CONSTRUCTORS["range"],
    slice: CONSTRUCTORS["slice"],
    collections.OrderedDict: _ordered,
    torch.device: CONSTRUCTORS["torch.device"],
    torch.Size: _sizes,
}


class _Opcodes(dict[int, Callable[[Any], None]]):
    """Handlers by opcode; an opcode without one is rejected by name."""

    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise ForbiddenTypeError(
            _NAME, f"it contains the opcode {_OPCODE_NAMES.get(opcode, opcode)}"
        )


_OPCODE_NAMES = {
    getattr(pickle, name)[0]: name
    for name in pickle.__all__
    if name.isupper() and type(getattr(pickle, name)) is bytes
}

_Unpickler.dispatch = _Opcodes(
    {
        **{
            getattr(pickle, name)[0]: _PythonUnpickler.dispatch[getattr(pickle, name)[0]]
            for name in _PLAIN_OPCODES
        },
        **{
            getattr(pickle, name)[0]: getattr(_Unpickler, f"load_{name.lower()}")
            for name in [
                "TUPLE",
                "TUPLE1",
                "TUPLE2",
                "TUPLE3",
                "FROZENSET",
                "APPEND",
                "APPENDS",
                "ADDITEMS",
                "SETITEM",
                "SETITEMS",
                "REDUCE",
                "NEWOBJ",
                "NEWOBJ_EX",
                "BUILD",
                "BYTEARRAY8",
                "BINGET",
                "LONG_BINGET",
            ]
        },
    }
)
