"""Point-to-point messages: send and receive, and probes for messages that have arrived."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict, Unpack, overload

from objcomm._calls.group import Group
from objcomm._calls.work import Envelope, Work
from objcomm._config import Allowed, DeviceLike, GroupLike, Timeout
from objcomm._observe.published import folded
from objcomm._p2p.call import HeldReceive, Receive, Send, checked_tag
from objcomm._p2p.mailbox import Arrived
from objcomm._p2p.peer import peers_of
from objcomm.errors import BrokenGroupError, ObjcommError, UsageError


class _Sending(TypedDict, total=False):
    """The keywords of ``send`` that do not affect the type of its result."""

    group_dst: int | None
    tag: int
    group: GroupLike
    timeout: Timeout
    codec: str | None


class _Decoding(TypedDict, total=False):
    """The keywords for decoding a message."""

    device: DeviceLike
    accept: Iterable[str] | None
    allow: Iterable[Allowed] | None


class _Receiving(_Decoding, total=False):
    """The keywords of ``recv``."""

    group_src: int | None
    tag: int | None
    group: GroupLike
    timeout: Timeout


@overload
def send(
    obj: object,
    dst: int | None = None,
    *,
    async_op: Literal[False] = False,
    **options: Unpack[_Sending],
) -> None: ...
@overload
def send(
    obj: object,
    dst: int | None = None,
    *,
    async_op: Literal[True],
    **options: Unpack[_Sending],
) -> Work[None]: ...
@overload
def send(
    obj: object,
    dst: int | None = None,
    *,
    async_op: bool,
    **options: Unpack[_Sending],
) -> Work[None] | None: ...
def send(
    obj: object,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    tag: int = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    async_op: bool = False,
) -> Work[None] | None:
    """Send an object to one rank, which calls ``recv``.

    No other rank participates. Collectives of the two ranks may run before, after or at the same
    time. Any thread may send. Messages of one sender with one tag arrive in the order in which they
    were sent. With NCCL and XCCL, large tensors on a device go directly to the receiver's device.

    Args:
        obj: the object to send.
        dst: global rank of the receiver, which may be this rank.
        group_dst: the receiver as a rank within the group, instead of ``dst``.
        tag: from 0 to 2**32 - 1; a receive takes messages with one tag, or with any.
        group: process group or one-dimensional device mesh with both ranks; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes the object.
        async_op: return a ``Work`` immediately. Do not modify tensors or arrays in ``obj`` before
            its ``wait`` returns.

    Returns:
        None, once the message is accepted. A small one (up to 1.5 MiB, or 32 KiB over Gloo) is
        accepted as soon as the receiver has sent to this rank or received from it at least once. A
        large one is accepted by its ``recv``.

    Raises:
        UsageError: an argument is invalid. Nothing was sent.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: the object can't be encoded, or the receiver refused it. Raised on both
            ranks.
        DesyncError: the receiver waits for this rank in another call, and neither call has a
            ``timeout``. Raised on both ranks.
        TransportTimeout: the timeout expired, which ends the connection of the two ranks. If this
            send was still queued behind another one, only this send ends.
        TransportError: the receiver died. Later calls between the two raise BrokenGroupError.

    Examples:
        >>> import objcomm
        >>> objcomm.send({"step": 3}, 0)
        >>> objcomm.recv(0)
        {'step': 3}
    """
    p2p_call = Send(dst, group_dst, tag, group, timeout, codec=codec)
    if async_op:
        return p2p_call.launch(obj)
    p2p_call.run(obj)
    return None


@overload
def recv(
    src: int | None = None,
    *,
    with_envelope: Literal[True],
    async_op: Literal[False] = False,
    **options: Unpack[_Receiving],
) -> tuple[Any, Envelope]: ...
@overload
def recv(
    src: int | None = None,
    *,
    with_envelope: bool = False,
    async_op: Literal[False] = False,
    **options: Unpack[_Receiving],
) -> Any: ...
@overload
def recv(
    src: int | None = None,
    *,
    with_envelope: bool = False,
    async_op: Literal[True],
    **options: Unpack[_Receiving],
) -> Work[Any]: ...
@overload
def recv(
    src: int | None = None,
    *,
    with_envelope: bool = False,
    async_op: bool,
    **options: Unpack[_Receiving],
) -> Any | Work[Any]: ...
def recv(
    src: int | None = None,
    *,
    group_src: int | None = None,
    tag: int | None = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    with_envelope: bool = False,
    async_op: bool = False,
) -> Any:
    """Receive an object that one rank sends to this one.

    Takes the first message that has arrived and matches. If several receives match a message, the
    one that was called first gets it. Any thread may receive.

    Args:
        src: global rank of the sender. Without ``src`` and ``group_src``, any rank.
        group_src: the sender as a rank within the group, instead of ``src``.
        tag: tag of the message; None accepts any.
        group: process group or one-dimensional device mesh with both ranks; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout. No message is lost when it
            expires: one that arrives later waits for the next receive. A message that has begun to
            arrive gets the same time again, at least 2 s.
        device: device on which to place received tensors.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        with_envelope: also return who sent the message, its tag and its length.
        async_op: return a ``Work`` immediately. Its ``wait`` returns the object, and its
            ``envelope`` then identifies the sender.

    Returns:
        The object; with ``with_envelope``, a tuple of the object and an ``objcomm.Envelope``.

    Raises:
        UsageError: an argument is invalid, or this rank waits for itself but has sent nothing.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: the sender could not encode the object. Raised on both ranks.
        DecodeError: the object could not be rebuilt. Raised on this rank only.
        DesyncError: the sender waits for this rank in another call, and neither call has a
            ``timeout``. Raised on both ranks.
        TransportTimeout: the timeout expired.
        TransportError: the sender died or, if any rank may send, some rank died. A receive from any
            rank ignores ranks whose programs have ended, unless no other rank is left.

    Examples:
        >>> import objcomm
        >>> objcomm.send("ready", 0, tag=7)
        >>> objcomm.recv(tag=7)
        'ready'
        >>> objcomm.send("who?", 0, tag=3)
        >>> obj, envelope = objcomm.recv(tag=None, with_envelope=True)
        >>> obj, envelope.src, envelope.tag
        ('who?', 0, 3)
    """
    p2p_call = Receive(
        src, group_src, tag, group, timeout, device=device, accept=accept, allow=allow
    )
    p2p_call.has_envelope = with_envelope
    return p2p_call.launch() if async_op else p2p_call.run()


def isend(
    obj: object,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    tag: int = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
) -> Work[None]:
    """Start to send an object to one rank; the same as ``send`` with ``async_op=True``.

    Args:
        obj: the object to send. Do not modify tensors or arrays in it before ``wait`` returns.
        dst: global rank of the receiver.
        group_dst: the receiver as a rank within the group, instead of ``dst``.
        tag: tag of the message.
        group: process group or one-dimensional device mesh with both ranks; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes the object.

    Returns:
        A ``Work``, whose ``wait`` returns once the message is accepted.

    Raises:
        ObjcommError: see ``objcomm.send``. Invalid arguments raise immediately. All other errors
            are raised when you wait for the work.

    Examples:
        >>> import objcomm
        >>> work = objcomm.isend([1, 2], 0)
        >>> objcomm.recv(0), work.wait()
        ([1, 2], None)
    """
    p2p_call = Send(dst, group_dst, tag, group, timeout, codec=codec, reported_as="isend")
    return p2p_call.launch(obj)


def irecv(
    src: int | None = None,
    *,
    group_src: int | None = None,
    tag: int | None = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
) -> Work[Any]:
    """Start to receive an object; the same as ``recv`` with ``async_op=True``.

    Args:
        src: global rank of the sender. Without ``src`` and ``group_src``, any rank.
        group_src: the sender as a rank within the group, instead of ``src``.
        tag: tag of the message; None accepts any.
        group: process group or one-dimensional device mesh with both ranks; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        device: device on which to place received tensors.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.

    Returns:
        A ``Work``, whose ``wait`` returns the object. Its ``envelope`` then identifies the sender.

    Raises:
        ObjcommError: see ``objcomm.recv``. Invalid arguments raise immediately. All other errors
            are raised when you wait for the work.

    Examples:
        >>> import objcomm
        >>> work = objcomm.irecv(0)
        >>> objcomm.send("late", 0)
        >>> work.wait()
        'late'
    """
    options: _Decoding = {"device": device, "accept": accept, "allow": allow}
    p2p_call = Receive(src, group_src, tag, group, timeout, **options, reported_as="irecv")
    return p2p_call.launch()


def ssend(
    obj: object,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    tag: int = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
) -> None:
    """Send an object to one rank, and return when that rank has received it.

    ``send`` may return earlier for a small object, which then waits at the receiver. No other rank
    participates.

    Args:
        obj: the object to send.
        dst: global rank of the receiver. If it is this rank, a receive must have begun.
        group_dst: the receiver as a rank within the group, instead of ``dst``.
        tag: tag of the message.
        group: process group or one-dimensional device mesh with both ranks; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout. When it expires, a small
            object (32 KiB with its header) stays at the receiver and can still be received.
        codec: name of the codec that encodes the object.

    Returns:
        None, once a ``recv``, ``irecv`` or ``sendrecv`` of the receiver has taken the message.

    Raises:
        UsageError: this rank would wait for itself. Nothing was sent.
        ObjcommError: see ``objcomm.send``.

    Examples:
        >>> import objcomm
        >>> receiving = objcomm.irecv(0)
        >>> objcomm.ssend("handed over", 0)
        >>> receiving.wait()
        'handed over'
    """
    p2p_call = Send(dst, group_dst, tag, group, timeout, codec=codec, name="ssend")
    p2p_call.is_synchronous = True
    p2p_call.run_until_received(obj)


def issend(
    obj: object,
    dst: int | None = None,
    *,
    group_dst: int | None = None,
    tag: int = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
) -> Work[None]:
    """Start to send an object to one rank, like ``ssend``, but return immediately.

    Args:
        obj: the object to send. Do not modify tensors or arrays in it before ``wait`` returns.
        dst: global rank of the receiver, which may be this rank.
        group_dst: the receiver as a rank within the group, instead of ``dst``.
        tag: tag of the message.
        group: process group or one-dimensional device mesh with both ranks; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.
        codec: name of the codec that encodes the object.

    Returns:
        A ``Work``, whose ``wait`` returns once the receiver has received the object.

    Raises:
        ObjcommError: see ``objcomm.ssend``. Invalid arguments raise immediately. All other errors
            are raised when you wait for the work.

    Examples:
        >>> import objcomm
        >>> work = objcomm.issend("read this", 0)
        >>> work.done(), objcomm.recv(0), work.wait()
        (False, 'read this', None)
    """
    p2p_call = Send(dst, group_dst, tag, group, timeout, codec=codec, name="issend")
    p2p_call.is_synchronous = True
    return p2p_call.launch(obj)


def sendrecv(
    obj: object,
    dst: int | None = None,
    src: int | None = None,
    *,
    group_dst: int | None = None,
    group_src: int | None = None,
    tag: int = 0,
    recv_tag: int | Literal["same"] | None = "same",
    group: GroupLike = None,
    timeout: Timeout = None,
    codec: str | None = None,
    device: DeviceLike = None,
    accept: Iterable[str] | None = None,
    allow: Iterable[Allowed] | None = None,
    with_envelope: bool = False,
) -> Any:
    """Send an object to one rank and receive one at the same time, as in a step of a ring.

    Args:
        obj: the object to send.
        dst: global rank of the receiver.
        src: global rank of the sender. Without ``src`` and ``group_src``, any rank.
        group_dst: the receiver as a rank within the group, instead of ``dst``.
        group_src: the sender as a rank within the group, instead of ``src``.
        tag: tag of the message that is sent.
        recv_tag: tag of the message that is received; None accepts any. Defaults to ``tag``.
        group: process group or one-dimensional device mesh with all these ranks; None means the
            world.
        timeout: seconds or timedelta, for each of the two messages; None uses the group's timeout.
        codec: name of the codec that encodes the object.
        device: device on which to place received tensors.
        accept: codecs this rank accepts in this call; see ``objcomm.configure``.
        allow: what a received pickle may name in this call; see ``objcomm.configure``.
        with_envelope: also return who sent the received message, its tag and its length.

    Returns:
        The received object; with ``with_envelope``, a tuple of the object and an
        ``objcomm.Envelope``.

    Raises:
        ObjcommError: see ``objcomm.send`` and ``objcomm.recv``.

    Examples:
        >>> import objcomm
        >>> objcomm.sendrecv("around", 0, 0)
        'around'
    """
    incoming_tag: int | None = tag
    if recv_tag != "same":
        incoming_tag = None if recv_tag is None else checked_tag("sendrecv", recv_tag, "recv_tag")
    outgoing = Send(dst, group_dst, tag, group, timeout, codec=codec, reported_as="sendrecv")
    # Before anything is sent, because its arguments may be invalid, too.
    options: _Decoding = {"device": device, "accept": accept, "allow": allow}
    incoming = Receive(
        src, group_src, incoming_tag, group, timeout, **options, reported_as="sendrecv"
    )
    incoming.has_envelope = with_envelope
    incoming.check_can_come(outgoing)
    sending = outgoing.launch(obj, is_kept=False)
    try:
        try:
            received = incoming.run()
        except ObjcommError as error:
            try:
                sending.wait()
            except ObjcommError as other:
                # If both fail for the same reason, one only reports that the other call failed.
                if isinstance(error, BrokenGroupError):
                    raise other from error
            raise
        sending.wait()
    except ObjcommError:
        raise
    except BaseException as error:  # Ctrl-C, or what a signal's handler raises
        sending.disown()
        outgoing.leave(sending, error)
        raise
    else:
        return received
    finally:
        del sending  # it refers to the error, whose traceback refers to this frame


def probe(
    src: int | None = None,
    *,
    group_src: int | None = None,
    tag: int | None = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> Envelope:
    """Wait for a message that ``recv`` with the same arguments would take.

    The message is left for a ``recv``. If several threads receive, another thread may take it
    first; see ``objcomm.mprobe``.

    Args:
        src: global rank of the sender. Without ``src`` and ``group_src``, any rank.
        group_src: the sender as a rank within the group, instead of ``src``.
        tag: tag of the message; None accepts any.
        group: process group or one-dimensional device mesh with both ranks; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        The message's sender, tag and length.

    Raises:
        ObjcommError: see ``objcomm.recv``, for errors before a message has arrived.

    Examples:
        >>> import objcomm
        >>> objcomm.send("which?", 0, tag=5)
        >>> found = objcomm.probe(tag=None)
        >>> objcomm.recv(found.src, tag=found.tag)
        'which?'
    """
    p2p_call = Receive(src, group_src, tag, group, timeout, name="probe")
    with p2p_call:
        return p2p_call.envelope_of(p2p_call.awaited(is_probe=True))


def iprobe(
    src: int | None = None,
    *,
    group_src: int | None = None,
    tag: int | None = 0,
    group: GroupLike = None,
) -> Envelope | None:
    """Check for a message that ``recv`` with the same arguments would take now.

    Never waits. The first call starts listening, so a message that is on its way is found later.

    Args:
        src: global rank of the sender. Without ``src`` and ``group_src``, any rank.
        group_src: the sender as a rank within the group, instead of ``src``.
        tag: tag of the message; None accepts any.
        group: process group or one-dimensional device mesh with both ranks; None means the world.

    Returns:
        The message's sender, tag and length, or None if there is no message.

    Raises:
        ObjcommError: see ``objcomm.recv``, for errors before it waits.

    Examples:
        >>> import objcomm
        >>> print(objcomm.iprobe(tag=9))
        None
    """
    p2p_call = Receive(src, group_src, tag, group, name="iprobe")
    # Neither counted nor recorded, because a polling program would flood the record.
    found = p2p_call.peek(is_probe=True)
    return None if found is None else p2p_call.envelope_of(found)


class Message:
    """A message found by ``mprobe`` or ``improbe``, which no other call can receive.

    It can be received once, by ``recv`` or ``irecv`` on any thread. Until then it counts as not
    received: a sender that waits for that (``ssend``, or ``send`` of a large object) keeps waiting,
    up to its timeout. If the message is garbage-collected without having been received, it goes
    back to its place ahead of later messages, for the next receive or probe.

    Attributes:
        envelope: its sender, tag and length.

    Examples:
        >>> import objcomm
        >>> objcomm.send("mine", 0, tag=5)
        >>> message = objcomm.mprobe(tag=None)
        >>> message.envelope.tag, message.recv()
        (5, 'mine')
    """

    __slots__ = ("__weakref__", "_held", "_received_at", "envelope")

    def __init__(self, group: Group, arrival: Arrived, envelope: Envelope) -> None:
        self.envelope = envelope
        self._received_at = ""
        # Empty once a thread has taken the message out.
        self._held = [(group, peers_of(group).mailbox, arrival)]

    def __repr__(self) -> str:
        src, tag = self.envelope.src, self.envelope.tag
        state = f"received at {self._received_at}" if self._received_at else "not received"
        return f"<objcomm.Message: from rank {src} with tag {tag}, {state}>"

    @folded
    def recv(
        self,
        *,
        timeout: Timeout = None,
        device: DeviceLike = None,
        accept: Iterable[str] | None = None,
        allow: Iterable[Allowed] | None = None,
    ) -> Any:
        """Receive the message and return its object, as ``objcomm.recv`` would have.

        Args:
            timeout: seconds or timedelta for the rest of a large object, at least 2 s; None uses
                the group's timeout.
            device: device on which to place received tensors.
            accept: codecs this rank accepts in this call; see ``objcomm.configure``.
            allow: what a received pickle may name in this call; see ``objcomm.configure``.

        Returns:
            The object.

        Raises:
            UsageError: the message was received already, or an argument is invalid.
            CollectiveError: the sender could not encode the object; raised on both ranks. Or it was
                sent in a ``fail_together`` block that has failed since; raised on this rank only.
            DecodeError: the object could not be rebuilt. Raised on this rank only.
            TransportTimeout: the timeout expired.
            TransportError: the sender died before the whole message had arrived, or the group was
                destroyed.

        Examples:
            >>> import objcomm
            >>> objcomm.send([1, 2], 0)
            >>> objcomm.mprobe(0).recv()
            [1, 2]
        """
        options: _Decoding = {"device": device, "accept": accept, "allow": allow}
        return self._taken(timeout, "recv", options).run()

    @folded
    def irecv(
        self,
        *,
        timeout: Timeout = None,
        device: DeviceLike = None,
        accept: Iterable[str] | None = None,
        allow: Iterable[Allowed] | None = None,
    ) -> Work[Any]:
        """Start to receive the message, like ``recv``, but return immediately.

        Args:
            timeout: seconds or timedelta; see ``recv``.
            device: device on which to place received tensors.
            accept: codecs this rank accepts in this call; see ``objcomm.configure``.
            allow: what a received pickle may name in this call; see ``objcomm.configure``.

        Returns:
            A ``Work``, whose ``wait`` returns the object. It can't be canceled, because its message
            has arrived.

        Raises:
            ObjcommError: see ``recv``. Invalid arguments raise immediately. All other errors are
                raised when you wait for the work.

        Examples:
            >>> import objcomm
            >>> objcomm.send("soon", 0)
            >>> objcomm.mprobe(0).irecv().wait()
            'soon'
        """
        options: _Decoding = {"device": device, "accept": accept, "allow": allow}
        return self._taken(timeout, "irecv", options).launch()

    def _taken(self, timeout: Timeout, reported_as: str, options: _Decoding) -> HeldReceive:
        """Return the only receive of this message, after checking the arguments."""
        for group, _, arrival in self._held:
            if arrival.mesh is not None:
                group.check_process("recv")
            p2p_call = HeldReceive(
                None, arrival.peer, arrival.tag, group, timeout, **options, reported_as=reported_as
            )
            p2p_call.arrival = arrival
            if self._let_go():
                self._received_at = p2p_call.entry.header.call_site
                return p2p_call
        src, tag = self.envelope.src, self.envelope.tag
        place = f" at {self._received_at}" if self._received_at else ""
        raise UsageError(
            f"recv: this message from rank {src} with tag {tag} was received already{place}; "
            "mprobe and improbe give one message each, so call them again for another"
        )

    def _let_go(self) -> bool:
        """Return whether the calling thread is the first to take the message out."""
        try:
            self._held.pop()
        except IndexError:
            return False
        return True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # the names of modules may already be None
            return
        for group, mailbox, arrival in getattr(self, "_held", ()):
            if arrival.mesh is None or not group.is_of_the_parent:
                mailbox.drop(arrival)


def mprobe(
    src: int | None = None,
    *,
    group_src: int | None = None,
    tag: int | None = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> Message:
    """Wait for a message as ``probe`` does, and take it out, so that no other call can receive it.

    After ``probe``, another thread may receive the message first.

    Args:
        src: global rank of the sender. Without ``src`` and ``group_src``, any rank.
        group_src: the sender as a rank within the group, instead of ``src``.
        tag: tag of the message; None accepts any.
        group: process group or one-dimensional device mesh with both ranks; None means the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        The message. Its ``envelope`` identifies the sender, and its ``recv`` returns the object.

    Raises:
        ObjcommError: see ``objcomm.recv``, for errors before a message has arrived.

    Examples:
        >>> import objcomm
        >>> objcomm.send("for one", 0, tag=5)
        >>> message = objcomm.mprobe(0, tag=None)
        >>> print(objcomm.iprobe(0, tag=5))
        None
        >>> message.recv()
        'for one'
    """
    p2p_call = Receive(src, group_src, tag, group, timeout, name="mprobe")
    with p2p_call:
        found = p2p_call.awaited()
        return Message(p2p_call.group, found, p2p_call.envelope_of(found))


def improbe(
    src: int | None = None,
    *,
    group_src: int | None = None,
    tag: int | None = 0,
    group: GroupLike = None,
) -> Message | None:
    """Check for a message as ``iprobe`` does, and take it out if there is one.

    Never waits. The first call starts listening, so a message that is on its way is found later.

    Args:
        src: global rank of the sender. Without ``src`` and ``group_src``, any rank.
        group_src: the sender as a rank within the group, instead of ``src``.
        tag: tag of the message; None accepts any.
        group: process group or one-dimensional device mesh with both ranks; None means the world.

    Returns:
        The message, which no other call can receive, or None if there is no message.

    Raises:
        ObjcommError: see ``objcomm.recv``, for errors before it waits.

    Examples:
        >>> import objcomm
        >>> print(objcomm.improbe(tag=9))
        None
        >>> objcomm.send("here", 0, tag=9)
        >>> objcomm.improbe(tag=9).recv()
        'here'
    """
    p2p_call = Receive(src, group_src, tag, group, name="improbe")
    # Neither counted nor recorded, like ``iprobe``.
    found = p2p_call.peek(is_probe=False)
    if found is None:
        return None
    return Message(p2p_call.group, found, p2p_call.envelope_of(found))
