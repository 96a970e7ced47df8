"""Remove from a starting Python what macOS lacks; its folder is in ``PYTHONPATH``.

So the programs that the tests start, and their child processes, lack it before their first import.
C++ code still gets everything from the system, and files end in ``.so``: this does not simulate all
of macOS.
"""

import builtins
import ctypes
import errno
import fcntl
import importlib.machinery
import io
import os
import re
import resource
import select
import signal
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

_FILES = ("/proc", "/sys", "/dev/shm")  # noqa: S108  # nothing is written there
_LIBRARY = "libc.so.6"
_FUNCTIONS = {"prctl", "gettid", "memfd_create", "eventfd", "epoll_create1", "pidfd_open"}
_MOST_FILES = 256  # limit of a process on macOS by default
_UNLIMITED = (1 << 63) - 1
_LINUX_REQUESTS = range(0x8900, 0x8A00)  # ioctl requests of sockets
_LINUX_COMMANDS = range(1024, 2048)  # fcntl commands

_MISSING: dict[types.ModuleType, str] = {
    os: r"sched_.*affinity|sched_.*scheduler|sched_.*param|eventfd.*|EFD_.*|memfd_.*|MFD_.*"
    r"|pidfd_.*|PIDFD_.*|P_PIDFD|pipe2|O_PATH|O_TMPFILE|O_DIRECT|O_LARGEFILE|O_NOATIME|splice|SPLICE_.*"
    r"|copy_file_range|posix_fallocate|posix_fadvise|getrandom|GRND_.*|fdatasync|.*xattr|XATTR_.*"
    r"|getresuid|getresgid|setresuid|setresgid|unshare|setns|CLONE_.*",
    # Python omits poll where macOS's is broken.
    select: r"e?poll|E?POLL.*",
    signal: r"pidfd_send_signal|sigtimedwait|sigwaitinfo|SIGRT.*|SIGPWR|SIGSTKFLT|SIGPOLL|SIGCLD",
    socket: r"SO_PEERCRED|SO_PASSCRED|SO_DOMAIN|SO_PROTOCOL|SO_BINDTODEVICE|SO_MARK|SO_PRIORITY"
    r"|MSG_CMSG_CLOEXEC|MSG_NOSIGNAL|SOCK_CLOEXEC|SOCK_NONBLOCK|TCP_USER_TIMEOUT|TCP_KEEPIDLE"
    r"|TCP_QUICKACK|AF_NETLINK|AF_PACKET|AF_VSOCK|AF_TIPC|AF_CAN",
    fcntl: r"F_.*SEAL.*|F_SETPIPE_SZ|F_GETPIPE_SZ|F_OFD_.*|F_NOTIFY|DN_.*|F_SETSIG|F_GETSIG",
    resource: r"prlimit|RUSAGE_THREAD|RLIMIT_(MSGQUEUE|NICE|RTPRIO|RTTIME|SIGPENDING|OFILE)",
    time: r"CLOCK_BOOTTIME|CLOCK_TAI|CLOCK_REALTIME_COARSE|CLOCK_MONOTONIC_COARSE",
}


def _refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a path so that it finds nothing in Linux-only folders."""

    def find(path: Any = ".", *args: Any, **options: Any) -> Any:
        name = "" if isinstance(path, int) else os.fsdecode(path)  # open and stat take descriptors
        if any(name == each or name.startswith(f"{each}/") for each in _FILES):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return call(path, *args, **options)

    return find


def _without_files() -> None:
    builtins.open = io.open = _refusing(io.open)  # pathlib uses the latter
    for name in ("open", "stat", "lstat", "statvfs", "listdir", "scandir", "readlink", "access"):
        setattr(os, name, _refusing(getattr(os, name)))


def _refused(call: Callable[..., Any], numbers: Iterable[int], number: int) -> Callable[..., Any]:
    """Wrap a system call so that it rejects Linux's own requests."""

    def ask(descriptor: Any, what: int, *args: Any) -> Any:
        if what in numbers:
            raise OSError(number, os.strerror(number))
        return call(descriptor, what, *args)

    return ask


def _on_named_sockets(name: str) -> None:
    """Refuse abstract names of Unix sockets."""
    call = getattr(socket.socket, name)

    def reach(self: socket.socket, address: Any) -> Any:
        if self.family == socket.AF_UNIX and address[:1] in {"\0", b"\0"}:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return call(self, address)

    setattr(socket.socket, name, reach)


def _without_library() -> None:
    opened, found = ctypes.CDLL.__init__, ctypes.CDLL.__getattr__

    def open_library(self: ctypes.CDLL, name: Any, *args: Any, **options: Any) -> None:
        if name == _LIBRARY:
            raise OSError(f"dlopen({name}): image not found")
        opened(self, name, *args, **options)

    def find(self: ctypes.CDLL, name: str) -> Any:
        if name in _FUNCTIONS:
            raise AttributeError(f"dlsym: symbol not found: {name}")
        return found(self, name)

    ctypes.CDLL.__init__ = open_library  # type: ignore[method-assign]  # for every library that is opened
    ctypes.CDLL.__getattr__ = find  # type: ignore[method-assign]  # likewise


def _limits() -> None:
    asked = resource.getrlimit
    _, most = asked(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_FILES, most))
    linux_unlimited = resource.RLIM_INFINITY

    def limits(which: int) -> tuple[int, int]:
        soft, hard = asked(which)
        if which == resource.RLIMIT_NOFILE:
            hard = linux_unlimited
        return tuple(_UNLIMITED if each == linux_unlimited else each for each in (soft, hard))  # type: ignore[return-value]  # always two

    resource.getrlimit = limits
    resource.RLIM_INFINITY = _UNLIMITED  # type: ignore[misc]  # for the lifetime of this Python


class _WithoutGloo:
    """Make torch's Gloo importable but unable to create a device, as without usable sockets."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch.distributed.distributed_c10d":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_without(module: types.ModuleType) -> None:
            load(module)

            def refuse(*_: Any, **__: Any) -> None:
                raise RuntimeError("makeDeviceForHostname(): unsupported gloo device")

            gloo = getattr(module, "ProcessGroupGloo", None)
            for each in ("__init__", "create_device", "create_default_device"):
                setattr(gloo, each, refuse)

        spec.loader.exec_module = load_without  # type: ignore[method-assign]  # of this module
        return spec


def _simulate() -> None:
    sysconfig.get_config_vars()  # from a file named after the platform
    sys.platform = "darwin"
    proxies = types.ModuleType("_scproxy")  # urllib imports it on macOS
    proxies.__dict__.update(_get_proxies=dict, _get_proxy_settings=dict)
    sys.modules["_scproxy"] = proxies
    for module, names in _MISSING.items():
        for name in [each for each in dir(module) if re.fullmatch(names, each)]:
            delattr(module, name)
    _limits()
    fcntl.ioctl = _refused(fcntl.ioctl, _LINUX_REQUESTS, errno.ENOTTY)
    fcntl.fcntl = _refused(fcntl.fcntl, _LINUX_COMMANDS, errno.EINVAL)
    for each in ("bind", "connect"):
        _on_named_sockets(each)
    _without_library()
    _without_files()
    sys.meta_path.insert(0, _WithoutGloo())


_simulate()
