"""Every public name, as users write it after ``objcomm.``."""

import inspect
from types import ModuleType
from typing import Any

import objcomm

#: Modules for one topic each. All of ``errors`` is available at the top level as well.
TOPICS = {
    name: member
    for name in objcomm.__all__
    if isinstance(member := getattr(objcomm, name), ModuleType)
}

PUBLIC: dict[str, Any] = {
    name: getattr(objcomm, name) for name in objcomm.__all__ if name not in TOPICS
} | {
    f"{topic}.{name}": getattr(module, name)
    for topic, module in TOPICS.items()
    if topic != "errors"
    for name in module.__all__
}

FUNCTIONS = {name: member for name, member in PUBLIC.items() if inspect.isfunction(member)}
