"""Messages from one rank to another: send, recv and their kin, and what has come and waits."""

from collections.abc import Iterable
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
    """The keywords of ``send`` that change nothing about what it returns."""

    group_dst: int | None
    tag: int
    group: GroupLike
    timeout: Timeout
    codec: str | None


class _Decoding(TypedDict, total=False):
    """The keywords that say how a message is decoded."""

    device: DeviceLike
    accept: Iterable[str] | None
    allow: Iterable[Allowed] | None


class _Receiving(_Decoding, total=False):
    """Those of ``recv``."""

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

    Only these two ranks take part, and the ranks' collectives may come before, after or meanwhile.
    Any thread may send; messages of one sender with one tag arrive in the order in which they were
    sent. Large tensors on a device go straight to the receiver's over NCCL and XCCL.

    Args:
        obj: what to send.
        dst: global rank of the receiver; this rank's own is allowed.
        group_dst: the same as a rank within the group; give one.
        tag: a receiver takes messages of one tag, or of any; from 0 to 2**32 - 1.
        group: to which both belong; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes the object.
        async_op: return a work at once; buffers of tensors and arrays in ``obj`` must not change
            before its ``wait`` returns.

    Returns:
        Nothing, when the message was taken. A small one (1.5 MiB, over Gloo 32 KiB) is taken when
        the receiver has once sent to or received from this rank, a large one in its ``recv``.

    Raises:
        UsageError: an argument is wrong; nothing was sent.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: the object can't be encoded, or the receiver refused it. Both ranks.
        DesyncError: the receiver waits for this rank elsewhere, and neither call has a ``timeout``.
            Both ranks.
        TransportTimeout: the limit passed; the connection of these two ranks ends. Where this send
            still waited for one before it only this one does.
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

    Takes the first message that has come and fits. Of several receives that a message fits, the
    one that was called first gets it. Any thread may receive.

    Args:
        src: global rank of the sender; neither this nor the next: from any rank.
        group_src: the same as a rank within the group.
        tag: of the message; None takes any.
        group: to which both belong; None for the world.
        timeout: seconds or timedelta; the group's own if None. When it passes nothing is lost: a
            message that comes later waits for the next receive. One that has begun to come gets as
            long again, 2 s at least.
        device: the device to place received tensors on.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        with_envelope: tell who sent it, too, with its tag and length.
        async_op: return a work at once, whose ``wait`` gives the object; its ``envelope`` tells who
            sent it.

    Returns:
        The object; with ``with_envelope`` a pair of the object and an ``objcomm.Envelope``.

    Raises:
        UsageError: an argument is wrong, or this rank waits for itself, which has sent nothing.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: the sender could not encode the object. Both ranks.
        DecodeError: the object could not be rebuilt. This rank only.
        DesyncError: the sender waits for this rank elsewhere, and neither call has a ``timeout``.
            Both ranks.
        TransportTimeout: the limit passed.
        TransportError: the sender died; or some rank did, where any may send. A rank whose program
            has ended is not waited for, unless it was the last one.

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
    """Begin to send an object to one rank: ``send`` with ``async_op=True``.

    Args:
        obj: what to send; buffers of tensors and arrays in it must not change before ``wait``.
        dst: global rank of the receiver.
        group_dst: the same as a rank within the group; give one.
        tag: of the message.
        group: to which both belong; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes the object.

    Returns:
        A work, whose ``wait`` returns when the message was taken.

    Raises:
        ObjcommError: whatever ``objcomm.send`` raises: what is wrong with the arguments at once,
            all else where the work is waited for.

    Examples:
        >>> import objcomm
        >>> work = objcomm.isend([1, 2], 0)
        >>> objcomm.recv(0), work.wait()
        ([1, 2], None)
    """
    p2p_call = Send(dst, group_dst, tag, group, timeout, codec=codec, said_by="isend")
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
    """Begin to receive an object: ``recv`` with ``async_op=True``.

    Args:
        src: global rank of the sender; neither this nor the next: from any rank.
        group_src: the same as a rank within the group.
        tag: of the message; None takes any.
        group: to which both belong; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        device: the device to place received tensors on.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.

    Returns:
        A work, whose ``wait`` gives the object, and whose ``envelope`` then tells who sent it.

    Raises:
        ObjcommError: whatever ``objcomm.recv`` raises: what is wrong with the arguments at once,
            all else where the work is waited for.

    Examples:
        >>> import objcomm
        >>> work = objcomm.irecv(0)
        >>> objcomm.send("late", 0)
        >>> work.wait()
        'late'
    """
    options: _Decoding = {"device": device, "accept": accept, "allow": allow}
    p2p_call = Receive(src, group_src, tag, group, timeout, **options, said_by="irecv")
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

    ``send`` returns sooner for a small object, which then waits at the receiver. Only these two
    ranks take part.

    Args:
        obj: what to send.
        dst: global rank of the receiver. For this rank itself a receive must have begun.
        group_dst: the same as a rank within the group; give one.
        tag: of the message.
        group: to which both belong; None for the world.
        timeout: seconds or timedelta; the group's own if None. When it passes a small object (32
            KiB with its header) stays at the receiver, who may receive it later.
        codec: what encodes the object.

    Returns:
        Nothing, when a ``recv``, ``irecv`` or ``sendrecv`` of the receiver has taken the message.

    Raises:
        UsageError: this rank would wait for itself; nothing was sent.
        ObjcommError: whatever ``objcomm.send`` raises.

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
    """Begin to send an object to one rank: ``ssend`` that returns at once.

    Args:
        obj: what to send; buffers of tensors and arrays in it must not change before ``wait``.
        dst: global rank of the receiver; this rank's own is allowed.
        group_dst: the same as a rank within the group; give one.
        tag: of the message.
        group: to which both belong; None for the world.
        timeout: seconds or timedelta; the group's own if None.
        codec: what encodes the object.

    Returns:
        A work, whose ``wait`` returns when the receiver has received the object.

    Raises:
        ObjcommError: whatever ``objcomm.ssend`` raises: what is wrong with the arguments at once,
            all else where the work is waited for.

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
    """Send an object to one rank and receive one, at the same time: the step of a ring.

    Args:
        obj: what to send.
        dst: global rank of the receiver.
        src: global rank of the sender; from any rank if neither this nor ``group_src`` is given.
        group_dst: ``dst`` as a rank within the group; give one.
        group_src: ``src`` as a rank within the group.
        tag: of the message that is sent.
        recv_tag: of the one that is received; None takes any.
        group: to which all belong; None for the world.
        timeout: seconds or timedelta, for each of the two; the group's own if None.
        codec: what encodes the object.
        device: the device to place received tensors on.
        accept: codecs that this rank decodes here, as in ``objcomm.configure``.
        allow: what a received pickle may name here, as in ``objcomm.configure``.
        with_envelope: tell who sent what was received, too, with its tag and length.

    Returns:
        The object that was received; with ``with_envelope`` a pair of it and an
        ``objcomm.Envelope``.

    Raises:
        ObjcommError: whatever ``objcomm.send`` and ``objcomm.recv`` raise.

    Examples:
        >>> import objcomm
        >>> objcomm.sendrecv("around", 0, 0)
        'around'
    """
    incoming_tag: int | None = tag
    if recv_tag != "same":
        incoming_tag = None if recv_tag is None else checked_tag("sendrecv", recv_tag, "recv_tag")
    outgoing = Send(dst, group_dst, tag, group, timeout, codec=codec, said_by="sendrecv")
    # Before anything is sent: its arguments may be wrong, too.
    options: _Decoding = {"device": device, "accept": accept, "allow": allow}
    incoming = Receive(src, group_src, incoming_tag, group, timeout, **options, said_by="sendrecv")
    incoming.has_envelope = with_envelope
    sending = outgoing.launch(obj, is_kept=False)
    try:
        received = incoming.run()
    except ObjcommError as error:
        try:
            sending.wait()
        except ObjcommError as other:
            # Of two that fail for one reason, one says only that the other did.
            if isinstance(error, BrokenGroupError):
                raise other from error
        raise
    except BaseException:  # Ctrl-C is not kept waiting
        sending.disown()
        raise
    else:
        sending.wait()
        return received
    finally:
        del sending  # it holds the error, whose traceback holds this frame


def probe(
    src: int | None = None,
    *,
    group_src: int | None = None,
    tag: int | None = 0,
    group: GroupLike = None,
    timeout: Timeout = None,
) -> Envelope:
    """Wait until there is a message that ``recv`` with the same arguments would take.

    Args:
        src: global rank of the sender; neither this nor the next: any rank.
        group_src: the same as a rank within the group.
        tag: of the message; None for any.
        group: to which both belong; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        Who sent it, its tag and length. It stays for a ``recv``; of several threads that receive
        another one may take it first.

    Raises:
        ObjcommError: whatever ``objcomm.recv`` raises before a message has come.

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
    """Whether there is a message that ``recv`` with the same arguments would take now.

    Never waits. The first call begins to listen, so a message that is under way shows later.

    Args:
        src: global rank of the sender; neither this nor the next: any rank.
        group_src: the same as a rank within the group.
        tag: of the message; None for any.
        group: to which both belong; None for the world.

    Returns:
        Who sent it, its tag and length, or None if there is none.

    Raises:
        ObjcommError: whatever ``objcomm.recv`` raises before it waits.

    Examples:
        >>> import objcomm
        >>> print(objcomm.iprobe(tag=9))
        None
    """
    p2p_call = Receive(src, group_src, tag, group, name="iprobe")
    # Neither counted nor recorded: a program that asks again and again would see nothing else.
    found = p2p_call.peek(is_probe=True)
    return None if found is None else p2p_call.envelope_of(found)


class Message:
    """A message that ``mprobe`` or ``improbe`` has found, and that nothing else can receive.

    One ``recv`` or ``irecv``, on any thread, receives it. Until then it counts as not received, so
    a sender that waits for that (``ssend``, or ``send`` of a large object) waits on, as long as its
    time limit allows. Where nobody refers to it any more, and it was not received, it goes back to
    its place before all that came later, for the next receive or probe.

    Attributes:
        envelope: who sent it, its tag and length.

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
        # Until one thread takes it out.
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
        """Receive it: its object, as ``objcomm.recv`` would have given it.

        Args:
            timeout: seconds or timedelta, for what has not come of a large object, 2 s at least;
                the group's own if None.
            device: the device to place received tensors on.
            accept: codecs that this rank decodes here, as in ``objcomm.configure``.
            allow: what a received pickle may name here, as in ``objcomm.configure``.

        Returns:
            The object.

        Raises:
            UsageError: it was received already, or an argument is wrong.
            CollectiveError: the sender could not encode the object: both ranks. Or it was sent in a
                block of ``fail_together`` that has failed since: this rank only.
            DecodeError: the object could not be rebuilt. This rank only.
            TransportTimeout: the limit passed.
            TransportError: the sender died before all of it had come; or the group was destroyed.

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
        """Begin to receive it: ``recv`` that returns at once.

        Args:
            timeout: seconds or timedelta, as in ``recv``.
            device: the device to place received tensors on.
            accept: codecs that this rank decodes here, as in ``objcomm.configure``.
            allow: what a received pickle may name here, as in ``objcomm.configure``.

        Returns:
            A work, whose ``wait`` gives the object. It can't be cancelled, as its message is here.

        Raises:
            ObjcommError: whatever ``recv`` raises: what is wrong with the arguments at once, all
                else where the work is waited for.

        Examples:
            >>> import objcomm
            >>> objcomm.send("soon", 0)
            >>> objcomm.mprobe(0).irecv().wait()
            'soon'
        """
        options: _Decoding = {"device": device, "accept": accept, "allow": allow}
        return self._taken(timeout, "irecv", options).launch()

    def _taken(self, timeout: Timeout, said_by: str, options: _Decoding) -> HeldReceive:
        """The one receive that there is for it, once nothing is wrong with the arguments."""
        for group, _, arrival in self._held:
            if arrival.mesh is not None:
                group.check_process("recv")
            p2p_call = HeldReceive(
                None, arrival.peer, arrival.tag, group, timeout, **options, said_by=said_by
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
        """Whether the calling thread is the first to take it out."""
        try:
            self._held.pop()
        except IndexError:
            return False
        return True

    def __del__(self) -> None:
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
    """Wait for a message as ``probe`` does, and take it out: no other call can receive it.

    With ``probe`` another thread may receive the message before the one that has found it does.

    Args:
        src: global rank of the sender; neither this nor the next: any rank.
        group_src: the same as a rank within the group.
        tag: of the message; None for any.
        group: to which both belong; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Returns:
        The message; its ``envelope`` tells who sent it, its ``recv`` gives the object.

    Raises:
        ObjcommError: whatever ``objcomm.recv`` raises before a message has come.

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
    """Look for a message as ``iprobe`` does, and take it out if there is one.

    Never waits. The first call begins to listen, so a message that is under way shows later.

    Args:
        src: global rank of the sender; neither this nor the next: any rank.
        group_src: the same as a rank within the group.
        tag: of the message; None for any.
        group: to which both belong; None for the world.

    Returns:
        The message, which no other call can receive, or None if there is none.

    Raises:
        ObjcommError: whatever ``objcomm.recv`` raises before it waits.

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
