"""What a user adds: codecs, and classes for the codec of plain data."""

import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import objcomm
from objcomm import CodecError, EncodeError, UsageError
from objcomm._codecs.base import Encoded
from objcomm._wire.header import HEADER_NBYTES, Header
from tests import samples
from tests.contracts import check_codec
from tests.ranks import solo


class Json:
    """A user's codec."""

    name = "json"

    def encode(self, obj: object, *, device_type: str | None = None) -> Encoded:
        del device_type
        try:
            return Encoded(json.dumps(obj).encode())
        except (TypeError, ValueError) as error:
            raise EncodeError(self.name, type(obj).__name__, "obj", str(error)) from error

    def decode(
        self, meta: memoryview, buffers: Sequence[Any], *, device: torch.device | None = None
    ) -> Any:
        del buffers, device
        return json.loads(bytes(meta))  # its errors become DecodeErrors


def test_a_registered_codec_keeps_the_contract() -> None:
    objcomm.codecs.register_codec(Json())
    check_codec(Json, lambda: [{"lr": 0.1, "é": [1, None]}, "text"], refused={1, 2})
    with objcomm.configure(codec="json"):
        assert objcomm.from_tensor(objcomm.to_tensor((1, 2))) == [1, 2]


@pytest.mark.parametrize("name", ["", "a name that is too long", "é", "new\nline"])
def test_a_codec_whose_name_fits_into_no_header_is_refused(name: str) -> None:
    codec = Json()
    codec.name = name
    with pytest.raises(UsageError):
        objcomm.codecs.register_codec(codec)


def test_the_error_for_an_unknown_codec_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"msgpack.*pickle"):
        objcomm.to_tensor(1, codec="morse")


class Unregistered:
    """A class that the codec of plain data does not know."""


def test_a_class_is_registered_once_under_one_name() -> None:
    assert objcomm.register(samples.Point) is samples.Point
    with pytest.raises(UsageError, match=r"tests\.samples\.Point"):
        objcomm.register(Unregistered, name="tests.samples.Point", encode=vars, decode=dict)
    for half in ({"encode": vars}, {"decode": dict}):
        with pytest.raises(UsageError):
            objcomm.register(Unregistered, **half)
    with pytest.raises(EncodeError):
        objcomm.to_tensor(Unregistered(), codec="msgpack")


@solo()
def test_registration_works_as_a_decorator_and_with_functions() -> None:
    @objcomm.register(encode=vars, decode=lambda state: Money(**state))
    class Money:
        def __init__(self, cents: int) -> None:
            self.cents = cents

    @objcomm.register(name="bag")
    class Bag:
        def __init__(self) -> None:
            raise AssertionError("decoding does not call __init__")

    bag = object.__new__(Bag)
    bag.__dict__.update(money=Money(2**70))
    got = objcomm.from_tensor(objcomm.to_tensor([bag], codec="msgpack"))
    assert type(got[0]) is Bag
    assert vars(got[0])["money"].cents == 2**70


def test_a_class_whose_state_cannot_be_found_needs_functions() -> None:
    for cls in (type("Slotted", (), {"__slots__": ("value",)}), type("Odd", (dict,), {})):
        with pytest.raises(UsageError, match="encode="):
            objcomm.register(cls)


class Touches:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_decoding_plain_data_runs_no_code(tmp_path: Path) -> None:
    bomb = tmp_path / "was run"
    pickled = objcomm.to_tensor(Touches(bomb), codec="pickle")
    raw = bytes(pickled.tolist())
    disguised = Header.unpack(raw)._replace(codec="msgpack").pack() + raw[HEADER_NBYTES:]
    with pytest.raises(CodecError):
        objcomm.from_tensor(torch.tensor(list(disguised), dtype=torch.uint8))
    assert not bomb.exists()
    objcomm.from_tensor(pickled)
    assert bomb.exists()


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


objcomm.register(Access)


def test_received_flags_are_not_kept_forever(codec: str) -> None:
    """Python's own lookup keeps every value for which it has created a member."""
    raw = [objcomm.to_tensor(Access(value), codec=codec) for value in (3, 1 << 40, 1, -2)]
    known = Access._value2member_map_
    for value in known.keys() - {1, 2}:
        del known[value]
    with objcomm.configure(allow=[Access]):
        got = [objcomm.from_tensor(each) for each in raw]
    assert got == [Access.READ | Access.WRITE, 1 << 40, Access.READ, Access.WRITE]
    assert got[2] is Access.READ
    assert known.keys() <= {1, 2, 3}
