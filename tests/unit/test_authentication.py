"""What a key proves: every way to forge, alter, redirect or replay a message."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import objcomm
from objcomm import AuthenticationError, DesyncError, UsageError
from objcomm._algorithms import routes
from objcomm._algorithms.exchange import Exchange
from objcomm._codecs.buffers import Buffer, BufferKind, readable
from objcomm._config import Settings, secret_of, settings
from objcomm._wire.admission import Gate
from objcomm._wire.failure_message import failure_message, failures_in
from objcomm._wire.header import HEADER_NBYTES, Flag, Header, Status
from objcomm._wire.message import Message, compose
from objcomm._wire.signing import Signer, environment_secret, read_key_file
from tests.ranks import solo
from tests.unit.memory_link import MemoryLink, Wires, exchange_on, header_of, new_lane
from tests.unit.routed import brought, run

KEY = "correct horse battery staple"
KEYED = Settings(secret=secret_of(KEY))
OTHER = Settings(secret=secret_of(KEY + "r"))
LARGE = torch.arange(100_000, dtype=torch.uint8)


def pair(
    sender: Settings = KEYED, receiver: Settings = KEYED, **fields: Any
) -> tuple[Exchange, Exchange, Wires]:
    """Return rank 1, which sends, and rank 0, which receives."""
    wires = Wires(2)
    sending = exchange_on(MemoryLink(wires, 1), new_lane(), chosen=sender, **fields)
    return sending, exchange_on(MemoryLink(wires, 0), new_lane(), chosen=receiver), wires


def message_of(exchange: Exchange, *, is_large: bool = False) -> Message:
    buffers = [Buffer(BufferKind.TENSOR, LARGE, LARGE)] if is_large else []
    return compose(exchange.header, b"content", buffers)


def head_of(exchange: Exchange, **options: Any) -> bytes | memoryview:
    return exchange.gate.head_of(message_of(exchange), **options)


@pytest.mark.parametrize(
    ("sender", "receiver", "text"),
    [
        (OTHER, KEYED, "has a bad signature"),
        (Settings(), KEYED, "without a signature, but this rank has a key"),
        (KEYED, Settings(), "signs its messages, but this rank has no key"),
    ],
)
def test_another_key_or_none_is_refused(sender: Settings, receiver: Settings, text: str) -> None:
    sending, receiving, _ = pair(sender, receiver)
    sending.send_head(message_of(sending), [0])
    with pytest.raises(AuthenticationError, match=text) as caught:
        receiving.recv_heads([1])
    assert "rank 1" in str(caught.value)


def forged(alter: Callable[[Header], Header]) -> bytes:
    """Return a head whose header was altered and whose checksum is still valid."""
    head = head_of(pair()[0])
    return alter(Header.unpack(head)).pack() + head[HEADER_NBYTES:]


@pytest.mark.parametrize(
    "field",
    [
        *({"sender": 2}, {"root": 5}, {"sequence": 1}, {"lane": 1}, {"group": 1}, {"operation": 3}),
        *({"status": 2}, {"flags": 2}, {"epoch": 1}, {"fingerprint": 1}, {"codec": "msgpack"}),
        *({"call_site": "x"}, {"meta_nbytes": 1}, {"body_nbytes": 9}, {"payload_nbytes": 1}),
        *({"buffer_count": 0, "tag": 1}, {"destination": 0}, {"number": 2}),
        *({"digest": bytes(range(32))}, {"signature": bytes(range(32))}, {"body_checksum": 1}),
    ],
    ids=str,
)
def test_no_field_of_a_header_can_be_changed(field: dict[str, Any]) -> None:
    gate = Gate(KEYED, "a mesh", 0)
    assert gate.header_in(forged(lambda header: header)).number == 1
    with pytest.raises(AuthenticationError):
        gate.header_in(forged(lambda header: header._replace(**field)))


def altered(message: Message, at: int) -> Message:
    message.body = bytearray(message.body)
    message.body[at] ^= 1
    return message


def test_content_that_was_changed_is_not_decoded() -> None:
    sending, receiving, _ = pair()
    got = altered(receiving.open(head_of(sending), 1), 0)
    with pytest.raises(AuthenticationError, match=r"content .* is not what was signed"):
        got.check()
    large = message_of(sending, is_large=True)
    got = receiving.open(sending.gate.head_of(large), 1)
    receiving.make_room(got, 1)
    got.large[0].flat.zero_()
    with pytest.raises(AuthenticationError):
        got.check()


def test_a_failure_that_was_changed_is_not_believed() -> None:
    failure = objcomm.RankFailure(1, "E", "text", "")
    sending, receiving, _ = pair()
    sent = [failure_message(sending.header, [failure]) for _ in range(2)]
    whole, changed = (receiving.open(sending.gate.head_of(each), 1) for each in sent)
    assert failures_in([whole]) == {1: failure}
    with pytest.raises(AuthenticationError):
        failures_in([altered(changed, -1)])


def test_a_message_counts_once() -> None:
    sending, receiving, _ = pair()
    head = head_of(sending)
    receiving.open(head, 1)
    with pytest.raises(AuthenticationError, match="an old message was replayed"):
        receiving.open(head, 1)
    receiving.open(head_of(sending), 1)


def mesh_of_its_own(name: str) -> Settings:
    """Return a key that no other test has used, because message numbers count per mesh."""
    return Settings(secret=secret_of(f"{KEY} {name}"))


def next_call(wires: Wires, mesh: Settings, sequence: int = 1) -> Exchange:
    """Return rank 0's exchange in a later call."""
    return exchange_on(MemoryLink(wires, 0), new_lane(), chosen=mesh, sequence=sequence)


@pytest.mark.parametrize("has_next_begun", [False, True])
def test_a_message_of_an_earlier_call_is_old_and_not_out_of_step(*, has_next_begun: bool) -> None:
    mesh = mesh_of_its_own(f"earlier {has_next_begun}")
    old, first, wires = pair(mesh, mesh)
    for _ in range(1 + has_next_begun):
        last = head_of(old)
        first.open(last, 1)
    later = next_call(wires, mesh)
    if has_next_begun:  # its messages have numbers too, but not that of the second message
        sending, _, _ = pair(mesh, mesh, sequence=1)
        later.open(head_of(sending), 1)
    with pytest.raises(AuthenticationError, match="an old message was replayed"):
        later.open(last, 1)


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_message_that_comes_back_to_its_sender_is_refused(sequence: int) -> None:
    mesh = mesh_of_its_own(f"back {sequence}")
    _, mine, wires = pair(mesh, mesh)
    head = head_of(mine)
    with pytest.raises(AuthenticationError, match="this rank's own message came back"):
        next_call(wires, mesh, sequence).open(head, 1)


def test_a_rank_that_made_one_call_fewer_is_out_of_step_and_not_a_forger() -> None:
    mesh = mesh_of_its_own("fewer")
    behind, _, wires = pair(mesh, mesh)
    with pytest.raises(DesyncError, match="different calls"):
        next_call(wires, mesh).open(head_of(behind), 1)


def test_a_message_of_another_mesh_proves_nothing() -> None:
    head = Gate(KEYED, "yesterday's mesh", 1).head_of(compose(header_of(1), b""))
    with pytest.raises(AuthenticationError, match="has a bad signature"):
        Gate(KEYED, "today's mesh", 0).header_in(head)


def test_a_message_for_one_rank_is_refused_by_others() -> None:
    sending, receiving, _ = pair()
    head = head_of(sending, destination=2)
    with pytest.raises(AuthenticationError, match="sent this to rank 2"):
        receiving.open(head, 1)
    public = receiving.open(head_of(sending), 1)
    with pytest.raises(AuthenticationError, match="did not address this to a single rank"):
        receiving.gate.check_addressed(public.header)


def test_a_contribution_is_not_an_acknowledgement() -> None:
    sending, receiving, _ = pair()
    receiving.header = receiving.header._replace(flags=Flag.ACKNOWLEDGEMENT)
    with pytest.raises(AuthenticationError, match="an old message"):
        receiving.open(head_of(sending), 1)


PATTERNS = {"broadcast": 1, "scatter": 1, "gather": -1, "all_gather": 0}  # and their roots


@pytest.mark.parametrize("size", [2, 3, 9, 25])
@pytest.mark.parametrize("is_large", [False, True], ids=["inline", "large"])
def test_every_route_carries_signatures(size: int, *, is_large: bool) -> None:
    def body(exchange: Exchange) -> None:
        mine = message_of(exchange, is_large=is_large)  # signed once for each receiver
        for pattern, root in PATTERNS.items():
            for message in brought(pattern, exchange, root % size, lambda _: mine):
                message.check()
                assert bytes(message.meta) == b"content"
        routes.all_meet(exchange, compose(exchange.header._replace(status=Status.TREE), b""))

    run(size, body, chosen=mesh_of_its_own(f"{size} {is_large}"))


def test_bytes_without_a_group_are_signed() -> None:
    obj: dict[str, Any] = {"w": torch.arange(50_000.0), "name": "x"}
    unsigned = objcomm.to_tensor(1)
    with objcomm.configure(key=KEY):
        flat = objcomm.to_tensor(obj)
        assert torch.equal(objcomm.from_tensor(flat)["w"], obj["w"])
        for at in (HEADER_NBYTES + 3, flat.numel() - 1, 170, 230):
            damaged = flat.clone()
            damaged[at] ^= 1
            with pytest.raises(objcomm.WireError):
                objcomm.from_tensor(damaged)
        header = Header.unpack(bytes(readable(flat[:HEADER_NBYTES])))
        renamed = flat.clone()
        renamed[:HEADER_NBYTES] = torch.tensor([*header._replace(codec="msgpack").pack()])
        with pytest.raises(AuthenticationError):
            objcomm.from_tensor(renamed)
        with pytest.raises(AuthenticationError, match="without a signature"):
            objcomm.from_tensor(unsigned)
    with pytest.raises(AuthenticationError, match="this rank has no key"):
        objcomm.from_tensor(flat)
    with objcomm.configure(key=KEY.encode()):
        assert objcomm.from_tensor(flat)["name"] == "x"
    with objcomm.configure(key=KEY + "!"), pytest.raises(AuthenticationError):
        objcomm.from_tensor(flat)


def test_other_content_with_the_same_checksum_is_noticed() -> None:
    """CRC-32 is linear, so an attacker can change a body and keep its CRC."""
    with objcomm.configure(key=KEY):
        flat = objcomm.to_tensor(bytes(100))
    polynomial = 0x1_DB71_0641  # CRC-32's, bit-reversed; XORing it in keeps the checksum
    at = HEADER_NBYTES + 50
    altered = flat.clone()
    for bit in range(33):
        if polynomial >> bit & 1:
            altered[at + bit // 8] ^= 1 << bit % 8
    with objcomm.configure(key=KEY), pytest.raises(objcomm.WireError):
        objcomm.from_tensor(altered)


@pytest.mark.parametrize("key", ["", "fifteen letters", b"x" * 15])
def test_a_key_that_can_be_guessed_is_refused(key: str | bytes) -> None:
    with pytest.raises(UsageError, match="too short"):
        objcomm.configure(key=key)


def test_a_key_is_text_or_bytes_and_is_not_shown() -> None:
    with pytest.raises(UsageError, match="bytes or a string, not a int"):
        objcomm.configure(key=7)  # type: ignore[arg-type]
    assert KEY not in repr(KEYED)
    assert "secret" not in repr(KEYED)


def test_each_purpose_has_its_own_key() -> None:
    one, other = Signer(secret_of(KEY), "a"), Signer(secret_of(KEY), "b")
    assert len({one.sign(b"x"), other.sign(b"x"), one.digest([b"x"])}) == 3
    assert one.digest([b"x", b"y"]) == one.digest([b"xy"])
    assert one.is_signed(b"x", one.sign(b"x"))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


def test_a_key_file_of_this_user_is_read(key_file: Path) -> None:
    assert read_key_file(str(key_file)) == secret_of(KEY)
    key_file.chmod(0o400)
    assert read_key_file(str(key_file)) == secret_of(KEY)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o602, 0o610, 0o644, 0o777])
def test_a_key_file_that_others_can_open_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(UsageError, match="is open to others; run: chmod 600"):
        read_key_file(str(key_file))


def test_a_path_that_is_not_a_key_file_is_refused(key_file: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, text in ((pipe, "not a regular file"), (tmp_path, "read|regular"), ("none", "read")):
        with pytest.raises(UsageError, match=text):
            read_key_file(str(path))
    key_file.write_text("short\n")
    with pytest.raises(UsageError, match="too short"):
        read_key_file(str(key_file))


def test_another_users_key_file_is_refused(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = key_file.stat().st_uid
    if owner == 0:
        try:
            os.chown(key_file, 12345, -1)
        except OSError:
            pytest.skip("this user owns every file it can make")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UsageError, match="belongs to another user"):
        read_key_file(str(key_file))


@solo()
def test_the_environment_can_add_a_key_but_not_weaken_what_the_program_chose(tmp_path: Any) -> None:
    path = Path(tmp_path) / "key"
    path.write_text(KEY)
    path.chmod(0o644)
    os.environ["OBJCOMM_KEY_FILE"] = str(path)
    for name in ("ACCEPT", "ALLOW", "CODEC", "KEY", "MAX_NBYTES", "INSECURE", "MAX_DEPTH"):
        os.environ[f"OBJCOMM_{name}"] = "1"
    with pytest.raises(UsageError, match="open to others"):
        objcomm.to_tensor(1)
    path.chmod(0o600)
    with objcomm.configure(key=KEY + " of the program", accept={"msgpack"}):
        mine = objcomm.to_tensor(1, codec="msgpack")
        assert objcomm.from_tensor(mine) == 1
        with pytest.raises(objcomm.DecodeError):
            objcomm.from_tensor(objcomm.to_tensor(1, codec="pickle"))
    with pytest.raises(AuthenticationError):
        objcomm.from_tensor(mine)  # the environment has another key
    signed = objcomm.to_tensor(1)
    assert environment_secret() == secret_of(KEY)
    del os.environ["OBJCOMM_KEY_FILE"]
    assert objcomm.from_tensor(signed) == 1  # read once, so it cannot be taken away either
    assert settings() == Settings()


def test_options_apply_in_their_thread_or_everywhere() -> None:
    def accepted_in_a_thread() -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: settings().accept).result()

    with objcomm.configure(accept={"msgpack"}):
        assert accepted_in_a_thread() is None
    with objcomm.configure(accept={"msgpack"}, everywhere=True):
        assert accepted_in_a_thread() == {"msgpack"}
    assert accepted_in_a_thread() is None
