"""Codecs in one process: what they carry, what they refuse, and what they cost."""

import collections
import contextlib
import functools
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest
import torch

import objcomm
from objcomm import DecodeError, EncodeError, UsageError
from objcomm._codecs.base import Encoded, codec_named, decode, registry
from tests import samples
from tests.contracts import check_codec
from tests.same import assert_same
from tests.tensor_samples import Labelled

_CASES = [(codec, name) for codec in ("pickle", "msgpack") for name in samples.names(codec)]


@pytest.mark.parametrize(("codec", "name"), _CASES)
def test_a_sample_survives_the_way_through_bytes(codec: str, name: str) -> None:
    tensor = objcomm.to_tensor(samples.make(name), codec=codec)
    assert tensor.dtype is torch.uint8
    assert tensor.dim() == 1
    assert tensor.device.type == "cpu"
    got = objcomm.from_tensor(tensor)
    assert_same(got, samples.make(name), sharing=codec == "pickle")
    tensor.zero_()
    assert_same(got, samples.make(name), sharing=codec == "pickle")


def test_codecs_keep_their_contract(codec: str) -> None:
    values = ["nested", "tensor of 1 MB", "tensor column", "array", "32768 bytes", "bytearray"]
    check_codec(
        lambda: codec_named(codec),
        lambda: [samples.make(name) for name in values],
        refused=[1, threading.Lock()],
    )


def _subclass_of(cls: type) -> Any:
    return type(cls.__name__, (cls,), {})


_POINT = samples.Point(1, 2.0)

CULPRITS: dict[str, Callable[[Any], Any]] = {
    "obj": lambda culprit: culprit,
    "obj['cb']": lambda culprit: {"a": 1, "cb": culprit},
    "obj[1][2]": lambda culprit: [0, (1, 2, culprit)],
    "obj['a'][0]['b']": lambda culprit: {"a": [{"b": culprit}]},
    "obj.model.head": lambda culprit: samples.Plain(model=samples.Plain(head=culprit)),
    "obj.points[1].y": lambda culprit: samples.Run("r", [_POINT, _POINT._replace(y=culprit)]),
    "obj.args[1]": lambda culprit: ValueError(1, culprit),
    "obj.__cause__.args[0]": lambda culprit: _changed(ValueError(1), __cause__=ValueError(culprit)),
}
# Objects that the codec of plain data refuses as a whole.
PICKLED: dict[str, Callable[[Any], Any]] = {
    "obj.args[1]": lambda culprit: functools.partial(print, 1, culprit),
    "obj.keywords['end']": lambda culprit: functools.partial(print, end=culprit),
    "obj.flat[1]": lambda culprit: np.array([[1, culprit]], object),
}


@pytest.mark.parametrize(
    ("codec", "path", "make"),
    [
        *[(codec, *each) for codec in ("pickle", "msgpack") for each in CULPRITS.items()],
        *[("pickle", *each) for each in PICKLED.items()],
    ],
)
def test_a_refusal_names_the_member_and_its_path(codec: str, path: str, make: Any) -> None:
    with pytest.raises(EncodeError) as caught:
        objcomm.to_tensor(make(threading.Lock()), codec=codec)
    error = caught.value
    assert (error.codec, error.path, error.type_name) == (codec, path, "lock")
    assert error.reason
    assert all(fact in str(error) for fact in (codec, path, "lock"))


@pytest.mark.parametrize(
    "made", [{1: 2}.keys(), {1: 2}.values(), map(int, "12"), zip("12", strict=True), iter([1])]
)
def test_the_error_for_an_iterable_says_to_send_a_list(made: object) -> None:
    with pytest.raises(EncodeError, match=r"; send list\(obj\['a'\]\) instead$"):
        objcomm.to_tensor({"a": made}, codec="msgpack")


def test_the_error_for_a_generator_says_to_send_a_list(codec: str) -> None:
    with pytest.raises(EncodeError, match=r"; send list\(obj\[0\]\) instead$"):
        objcomm.to_tensor([(number for number in "12")], codec=codec)


class Answering(dict[str, int]):
    """A user's class that answers None for any missing attribute, even ``__setstate__``."""

    __getattr__ = dict.get


class Wrapper:
    """A user's class that recurses without end while it lacks its attribute ``inner``."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class WithSlots(Wrapper):
    __slots__ = ("kept",)
    kept: str


def test_an_object_that_answers_for_any_attribute_arrives_with_its_own() -> None:
    mapping, slotted, twice = Answering(a=1), WithSlots([]), Wrapper(3)
    vars(mapping)["itself"] = mapping
    slotted.kept = "kept"
    sent = [mapping, Wrapper(Wrapper([1])), slotted, twice, twice]
    tensor = objcomm.to_tensor(sent)
    for allow in (None, [Answering, Wrapper, WithSlots]):
        got = objcomm.from_tensor(tensor, allow=allow)
        assert list(map(type, got)) == list(map(type, sent))
        mapped, wrapped, with_slots, first, second = got
        assert (dict(mapped), mapped.itself is mapped) == ({"a": 1}, True)
        assert wrapped.inner.inner == [1]
        assert (with_slots.inner, with_slots.kept) == ([], "kept")
        assert first is second


def test_a_storage_and_its_tensor_share_their_memory_when_they_arrive() -> None:
    tensor = torch.arange(4.0)
    got, storage, again = objcomm.from_tensor(
        objcomm.to_tensor([tensor, tensor.untyped_storage(), tensor.untyped_storage()])
    )
    assert got.untyped_storage().data_ptr() == storage.data_ptr() == again.data_ptr()


def test_the_error_for_a_view_says_what_to_send() -> None:
    for view in (memoryview(b"abcd")[::2], np.zeros((2, 3), order="F").data):
        with pytest.raises(EncodeError, match=r"send bytes\(view\)") as caught:
            objcomm.to_tensor({"view": view})
        assert caught.value.path == "obj['view']"


def test_the_error_for_a_parametrized_module_says_what_to_send() -> None:
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    with pytest.raises(EncodeError, match="state_dict") as caught:
        objcomm.to_tensor(torch.nn.Sequential(module))
    assert caught.value.path == "obj._modules['0']"


def test_an_exported_program_computes_the_same_when_it_arrives() -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    got = objcomm.from_tensor(objcomm.to_tensor([program]))[0]
    assert str(got) == str(program)
    assert got.module()(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


class Unsettable:
    """A class whose instances can be encoded but not decoded."""

    def __init__(self, key: object = None) -> None:
        self.key = key

    def __getstate__(self) -> object:
        return (1,)

    def __setstate__(self, state: object) -> None:
        raise ArithmeticError("no such state")


class Unmakable:
    def __new__(cls, _: int) -> Self:
        return object.__new__(cls)


class HashedByAttribute:
    """A class whose instances have no hash before they have their state."""

    def __init__(self) -> None:
        self.key = 1
        self.known = {self}

    def __hash__(self) -> int:
        return hash(self.key)


@pytest.mark.parametrize(
    ("make", "path", "made_by"),
    [
        (Unsettable, "obj", "Unsettable"),
        (lambda: [[], (1, 2, Unsettable())], "obj[1][2]", "Unsettable"),
        (lambda: [*range(1500), Unsettable()], "obj[1500]", "Unsettable"),
        (lambda: dict.fromkeys(range(1500)) | {"z": Unsettable()}, "obj['z']", "Unsettable"),
        (lambda: {"a": [{"a": (Unmakable(1),)}], "b": 1}, "obj['a'][0]['a'][0]", "Unmakable"),
        (lambda: {Unsettable(): 1}, "obj key", "Unsettable"),
        (lambda: frozenset([Unsettable()]), "obj member", "Unsettable"),
        (lambda: collections.deque([1, Unsettable()]), "obj[1]", "Unsettable"),
        (lambda: samples.Plain(a=1, b=[Unsettable()]), "obj.b[0]", "Unsettable"),
        (lambda: [Wrapper(Unsettable())], "obj[0].inner", "Unsettable"),
        (lambda: [HashedByAttribute()], "obj[0].known", "set"),
        (lambda: [ValueError(1, Unsettable())], "obj[0] arguments[1][1]", "Unsettable"),
        (lambda: _changed(torch.nn.ReLU(), own={"a": Unsettable()}), "obj.own['a']", "Unsettable"),
    ],
)
def test_an_object_that_cannot_be_rebuilt_is_named(make: Any, path: str, made_by: str) -> None:
    with pytest.raises(DecodeError) as caught:
        objcomm.from_tensor(objcomm.to_tensor(make()))
    error = caught.value
    assert (error.path, error.made_by) == (path, made_by)
    for fact in (path, made_by, "on the rank that sent it: if that raises too"):
        assert fact in str(error)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # its own bytes
    assert (again.path, again.made_by, str(again)) == (path, made_by, str(error))


def test_nothing_that_a_sender_chose_is_called_to_find_where_decoding_failed() -> None:
    tensor = objcomm.to_tensor([print, Unsettable()])
    with (
        objcomm.configure(allow=[Unsettable, "builtins.print"]),
        pytest.raises(DecodeError, match="no such state") as caught,
    ):
        objcomm.from_tensor(tensor)
    assert caught.value.path == ""


class _Secretive(type):
    """A metaclass whose classes hide their names and everything else that a codec asks for."""

    def __getattribute__(cls, name: str) -> Any:
        raise LookupError(f"no {name}")


class Secret(metaclass=_Secretive):
    pass


def test_a_refusal_names_a_class_that_hides_its_name(codec: str) -> None:
    with pytest.raises(EncodeError) as caught:
        objcomm.to_tensor([Secret()], codec=codec)
    assert caught.value.type_name == "Secret"


REFUSED: dict[str, Any] = {
    "unregistered class": Unmakable(1),
    "class": Unmakable,
    "function": len,
    "lambda": lambda: 1,
    "unregistered exception": objcomm.UsageError("not registered"),
    "exception with an argument that is not plain data": ValueError(objcomm),
    "OrderedDict": collections.OrderedDict(a=1),
    "deque": collections.deque([1]),
    "subclass of str": _subclass_of(str)("a"),
    "subclass of int": _subclass_of(int)(1),
    "subclass of a registered class": _subclass_of(samples.Run)("a", []),
    "array of objects": np.array([1, "a"], object),
    "masked array": np.ma.masked_array([1], [True]),
    "memmap": np.array([1.0]).view(np.memmap),
    "array subclass": np.array([1.0]).view(type("Array", (np.ndarray,), {"__module__": "numpy"})),
    "array with metadata": np.zeros(2, np.dtype("i4", metadata={"unit": "s"})),
    "dtype with metadata": np.dtype("i4", metadata={"unit": "s"}),
    "dtype with a shape": np.dtype((np.int32, (2,))),
    "compressed sparse tensor": samples.make("compressed sparse tensor"),
    "tensor of a subclass": samples.make("tensor of a subclass"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plain_data_refuses_rather_than_change_a_type(name: str) -> None:
    with pytest.raises(EncodeError) as caught:
        objcomm.to_tensor({"x": [REFUSED[name]]}, codec="msgpack")
    assert caught.value.path.startswith("obj['x'][0]")


def test_the_error_for_deep_nesting_says_how_deep_an_object_may_be(codec: str) -> None:
    deep: Any = None
    linked: Any = None
    for _ in range(100_000):  # Python 3.12 allows 10 times as many levels as 3.11
        deep, linked = [deep], samples.Plain(next=linked)
    with objcomm.configure(max_depth=1_000_000):
        for each in (deep, linked):
            with pytest.raises(EncodeError, match="deeper than about 250 levels, flatten it"):
                objcomm.to_tensor(each, codec=codec)


def test_hostile_bytes_of_any_depth_give_an_error_or_an_object() -> None:
    depth = 1_000_000
    lists = b"\x80\x05" + b"]" * depth + b"a" * (depth - 1) + b"."
    objects = b"\x80\x05]" + b"(" * depth + b"t" * depth + b"a."
    for stream in (lists, objects, lists[:-1], lists[: depth // 2]):
        with contextlib.suppress(DecodeError):
            decode("pickle", memoryview(stream), ())
    for max_depth in (200, 2 * depth):
        with objcomm.configure(max_depth=max_depth), pytest.raises(DecodeError):
            decode("msgpack", memoryview(b"\x91" * depth + b"\x90"), ())


def test_only_the_viewed_elements_are_encoded(codec: str) -> None:
    huge = torch.empty(250_000_000)  # 1 GB, of which no page is ever touched
    assert objcomm.to_tensor(huge[3:4], codec=codec).numel() < 4096
    array = np.empty((1000, 1000))
    assert objcomm.to_tensor(array[:, 0], codec=codec).numel() < 8000 + 4096
    assert objcomm.to_tensor(torch.zeros(()).expand(9, 9, 9**4), codec=codec).numel() < 4096


class Keeping:
    """A codec whose decoded objects are the bytes it was given."""

    name = "keeping"

    def encode(self, obj: Any, **_: Any) -> Encoded:
        return Encoded(obj)

    def decode(self, meta: memoryview, _: Any, **__: Any) -> memoryview:
        return meta


def test_kept_bytes_are_not_a_view_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "codecs", {**registry.codecs, "keeping": Keeping()})
    tensor = objcomm.to_tensor(b"abc", codec="keeping")
    got = objcomm.from_tensor(tensor)
    tensor.zero_()
    assert bytes(got) == b"abc"


def test_tied_tensors_stay_tied_though_their_elements_must_be_copied(codec: str) -> None:
    square = torch.arange(1_000_000, dtype=torch.float32).view(1000, 1000)
    columns = {"a": square[:, ::2], "b": square[:, ::2], "other": square[:, 1::2]}
    mirrored = torch.ones(100_000, dtype=torch.complex64).conj()
    sent = objcomm.to_tensor([columns, mirrored, mirrored.view(-1)], codec=codec)
    assert sent.numel() < 2 * 2_000_000 + 800_000 + 10_000
    got, left, right = objcomm.from_tensor(sent)
    assert torch.equal(got["other"], square[:, 1::2])
    got["a"][0, 0] = left[0] = 5.0
    assert got["b"][0, 0] == 5.0
    assert right[0] == 5.0


@pytest.mark.parametrize("numel", [3, 2_000, 3_000, 9_000], ids="{} floats".format)
@pytest.mark.parametrize("allow", [None, []], ids=["any pickle", "allow=[]"])
def test_arrays_and_tensors_over_the_same_memory_stay_tied(numel: int, allow: Any) -> None:
    array = np.arange(2 * numel, dtype=np.float64).reshape(2, numel)
    tensor = torch.from_numpy(array)
    parts = [array, array.ravel(), array.T, array[0]]
    for sent in ([*parts, tensor, tensor.view(-1)], [tensor, tensor.view(-1), *parts]):
        got = objcomm.from_tensor(objcomm.to_tensor(sent), allow=allow)
        assert_same(got, sent, sharing=False)
        arrays = sorted((each for each in got if type(each) is np.ndarray), key=np.size)
        row, *whole = arrays
        tensors = [each for each in got if type(each) is torch.Tensor]
        whole[0].flat[0] = -1.0
        assert [each.flat[0] for each in whole] == [-1.0] * 3
        assert [each.view(-1)[0].item() for each in tensors] == [-1.0] * 2
        assert row[0] == 0.0


def test_tensors_over_a_small_array_stay_tied_on_a_device() -> None:
    array = np.arange(6.0)
    sent = objcomm.to_tensor([array, torch.from_numpy(array), torch.from_numpy(array).view(2, 3)])
    kept, left, right = objcomm.from_tensor(sent, device="meta")
    assert_same(kept, array)
    assert left.is_meta
    assert left.untyped_storage() is not None
    assert left.untyped_storage()._cdata == right.untyped_storage()._cdata  # noqa: SLF001  # identity


def test_a_tensor_of_a_subclass_arrives_with_what_its_class_added() -> None:
    huge = torch.zeros(1_000_000).as_subclass(Labelled)
    row: Any = huge[:1000].requires_grad_()
    row.label = {"unit": "mm"}
    sent = objcomm.to_tensor([row, row])
    assert sent.numel() < 4000 + 4096
    first, second = objcomm.from_tensor(sent)
    assert first is second
    assert type(first) is Labelled
    assert first.label == {"unit": "mm"}
    assert first.requires_grad
    assert first.is_leaf


class Made:
    """An object whose encoded content is created during encoding and kept by nothing else."""

    def __init__(self, before: "Made | None" = None) -> None:
        self.before = before
        self.made: weakref.ref[torch.Tensor] | None = None

    def columns(self) -> list[Any]:
        if self.before is not None:
            assert self.before.made is not None
            assert self.before.made() is not None
        column, array = torch.ones(100, 2)[:, 0], np.ones(100)
        self.made = weakref.ref(column)
        return [column, array]

    def __reduce__(self) -> Any:
        return list, (self.columns(),)


def test_copies_live_until_the_end_of_encoding(codec: str) -> None:
    """Otherwise another object could have the identity of one."""
    objcomm.register(Made, encode=Made.columns, decode=list, name="tests.Made")
    first = Made()
    got = objcomm.from_tensor(objcomm.to_tensor([first, Made(first)], codec=codec))
    assert [part.sum() for parts in got for part in parts] == [100] * 4


def test_an_attribute_of_a_tensor_that_is_not_plain_data_is_refused_with_its_path() -> None:
    weight: Any = torch.nn.Parameter(torch.ones(2))
    weight.loader = threading.Lock()
    with pytest.raises(EncodeError) as caught:
        objcomm.to_tensor({"w": weight}, codec="msgpack")
    assert (caught.value.path, caught.value.type_name) == ("obj['w'].loader", "lock")
    vars(weight).clear()
    vars(weight)["grad_fn"] = 1  # each tensor has its own
    with pytest.raises(EncodeError, match="'grad_fn' is set"):
        objcomm.to_tensor([weight], codec="msgpack")


class Evaluation(Exception):  # a user's class
    """``__init__`` takes other arguments than the base class gets."""

    def __init__(self, step: int, *, metric: str) -> None:
        super().__init__(f"{metric} at step {step}")
        self.step = step


class Reduced(Evaluation):
    """Defines how it is pickled."""

    def __reduce__(self) -> Any:
        return _reduced, (self.step,)


def _reduced(step: int) -> Reduced:
    return Reduced(step, metric="loss")


objcomm.register(Evaluation, name="tests.Evaluation")
objcomm.register(Reduced, encode=lambda error: error.step, decode=_reduced, name="tests.Reduced")


@pytest.mark.parametrize("kind", [Evaluation, Reduced])
def test_an_exception_arrives_with_all_that_led_to_it(codec: str, kind: Any) -> None:
    cause = ImportError("no", name="torch", path="/p")
    cause.__context__ = FileNotFoundError(2, "gone", "a", None, "b")
    error = kind(3, metric="loss")
    error.__cause__ = cause
    error.__context__ = cause
    error.add_note("on rank 1")
    got = objcomm.from_tensor(objcomm.to_tensor([error], codec=codec))[0]
    assert type(got) is kind
    assert (str(got), got.step) == ("loss at step 3", 3)
    assert (codec == "msgpack" and kind is Reduced) or got.__notes__ == ["on rank 1"]
    assert got.__cause__ is got.__context__
    assert got.__suppress_context__
    assert (got.__cause__.name, got.__cause__.path) == ("torch", "/p")
    assert str(got.__cause__.__context__) == str(cause.__context__)


def _changed(error: Any, **changes: object) -> Any:
    for name, value in changes.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: ModuleNotFoundError("no", name="m"), ["name", "path", "msg"]),
        (lambda: AttributeError("no", name="m"), ["name"]),
        (lambda: NameError("no", name="m"), ["name"]),
        (lambda: BlockingIOError(11, "x", 5), ["characters_written"]),
        (lambda: _changed(StopIteration(4), value=5), ["value", "args"]),
        (lambda: _changed(ValueError("x"), code=3), ["code"]),
        (lambda: _changed(OSError(2, "x"), filename="f"), ["filename", "errno", "strerror"]),
    ],
)
def test_attributes_of_a_builtin_exception_arrive(codec: str, make: Any, names: list[str]) -> None:
    got = objcomm.from_tensor(objcomm.to_tensor(make(), codec=codec))
    for name in names:
        assert getattr(got, name) == getattr(make(), name)


def test_an_exception_in_the_arguments_of_the_next_is_encoded_once(codec: str) -> None:
    error: Exception = ValueError("first")
    for turn in range(60):
        outer = RuntimeError(turn, error)
        outer.__cause__ = outer.__context__ = error
        error = outer
    got = objcomm.from_tensor(objcomm.to_tensor(error, codec=codec))
    assert got.__cause__ is got.args[1]


def test_plain_data_refuses_a_syntax_error_whose_position_was_changed() -> None:
    error = _changed(SyntaxError("m", ("f", 1, 2, "t", 1, 3)), lineno=7)
    assert objcomm.from_tensor(objcomm.to_tensor(error)).lineno == 7
    with pytest.raises(EncodeError, match="'lineno' was changed"):
        objcomm.to_tensor([error], codec="msgpack")


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(300), torch.ones(20, 20, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)],
    ids=["floats", "two dimensions", "empty"],
)
def test_a_tensor_that_is_not_a_message_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises((UsageError, objcomm.WireError)):
        objcomm.from_tensor(tensor)


def test_a_message_may_be_a_strided_tensor() -> None:
    sent = objcomm.to_tensor({"a": torch.arange(50_000)})
    apart = torch.zeros(sent.numel() * 2, dtype=torch.uint8)
    apart[::2] = sent
    assert torch.equal(objcomm.from_tensor(apart[::2])["a"], torch.arange(50_000))
