"""A function compiled by ``torch.compile`` may call objcomm; each call only breaks the graph."""

import inspect
import shutil
import warnings
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import objcomm
from tests.cases import case
from tests.group.operations import MESSAGES, OPERATIONS, Call
from tests.public_names import PUBLIC
from tests.ranks import ranks

PACKAGE = str(Path(objcomm.__file__).parent)
COMPILE_DEADLINE_S = 600.0  # a C++ compiler runs, in parallel with other tests


def compiled(function: Any, **options: Any) -> Any:
    """Compile a function after clearing what dynamo cached in other tests."""
    torch.compiler.reset()
    return torch.compile(function, **options)


def frames_of_objcomm() -> list[str]:
    """Return the functions of objcomm that dynamo has inspected since its reset."""
    from torch._dynamo.convert_frame import input_codes  # noqa: PLC0415  # slow to import

    codes = [reference() for reference in input_codes.seen]
    return [code.co_qualname for code in codes if code and code.co_filename.startswith(PACKAGE)]


@ranks(2, deadline=COMPILE_DEADLINE_S)
def test_every_operation_breaks_the_graph_and_dynamo_sees_no_frame_of_it() -> None:
    for name in (*OPERATIONS, "sendrecv"):
        with case(name):
            compile_a_step_with({**OPERATIONS, **MESSAGES}[name])


def compile_a_step_with(operation: Call) -> None:
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    def step(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        y = x * 2
        got = operation(7)
        return y + 1, got

    run = compiled(step, backend=backend)
    want = operation(7)
    for _ in range(2):
        y, got = run(torch.ones(3))
        assert y.tolist() == [3, 3, 3]
        assert got == want
    assert frames_of_objcomm() == []
    assert len(graphs) >= 1


@ranks(2, deadline=COMPILE_DEADLINE_S)
def test_a_decorated_function_breaks_the_graph() -> None:
    @objcomm.main_process_only
    def on_main(number: int) -> int:
        return number + objcomm.world_size()

    @objcomm.once_per_node
    def on_node(number: int) -> int:
        return number + objcomm.world_size()

    run = compiled(lambda x: (x * 2 + 1, on_main(1) + on_node(2)), backend="eager")
    for _ in range(2):
        y, got = run(torch.ones(3))
        assert y.tolist() == [3, 3, 3]
        assert got == 7
    assert frames_of_objcomm() == []


@ranks(2, deadline=COMPILE_DEADLINE_S)
@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param("inductor", marks=[pytest.mark.long, pytest.mark.lasting]),  # compiles C++
    ],
)
def test_a_compiled_step_computes_what_it_computes_uncompiled(backend: str) -> None:
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("Inductor needs a C++ compiler")

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * (objcomm.rank() + 1)
        shapes = objcomm.all_gather({"shape": tuple(x.shape)})
        objcomm.barrier("middle")
        z = objcomm.broadcast(y + 1, src=1)
        total = objcomm.all_reduce(y, "sum", group=objcomm.split("all"))
        work = objcomm.metrics.all_gather_scalar(2.0, async_op=True)
        with objcomm.lane("side"), objcomm.fail_together():
            objcomm.barrier()
        scale = work.wait()
        return z * len(shapes) + total * scale[0] + objcomm.world_size()

    want = step(torch.arange(4.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's warnings do not matter here
        run = compiled(step, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(run(torch.arange(4.0)), want)
    assert frames_of_objcomm() == []


@ranks(2, deadline=COMPILE_DEADLINE_S)
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_gradients_flow_through_what_was_compiled_around_a_call(backend: str) -> None:
    def loss(w: torch.Tensor) -> torch.Tensor:
        y = w * 3
        scale = objcomm.all_reduce(float(objcomm.rank() + 1), "sum")
        return (y * scale).sum()

    w = torch.ones(2, requires_grad=True)
    compiled(loss, backend=backend)(w).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [9, 9]


@ranks(2, deadline=COMPILE_DEADLINE_S)
def test_fullgraph_raises_with_the_reason_for_the_graph_break() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        objcomm.barrier()
        return x + 1

    with pytest.raises(Exception, match="moves objects between processes"):
        compiled(step, backend="eager", fullgraph=True)(torch.ones(1))


def public_functions() -> dict[str, FunctionType]:
    """Return each public function and each method of each public class, by name."""
    found = {}
    for name, member in PUBLIC.items():
        if inspect.isfunction(member):
            found[name] = member
        elif inspect.isclass(member) and not issubclass(member, Exception):
            methods = inspect.getmembers_static(member, inspect.isfunction)
            found |= {f"{name}.{each}": method for each, method in methods}
    return {
        name: function
        for name, function in found.items()
        if function.__code__.co_filename.startswith(PACKAGE)
    }


def test_every_public_function_is_marked() -> None:
    functions = public_functions()
    assert {"broadcast", "rank", "lane.__enter__", "fail_together.__exit__"} <= set(functions)
    for name, function in functions.items():
        assert function.__dict__.get("_torchdynamo_disable") is True, name
