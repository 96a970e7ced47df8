"""The cost and needs of the import: what it loads, and what may be missing."""

import pytest

import objcomm
from tests.scripts import run_python


def test_the_first_use_of_a_name_loads_all_names() -> None:
    run_python(
        """
        import sys, objcomm
        assert "torch" not in sys.modules
        assert objcomm.__version__ and "torch" not in sys.modules
        assert objcomm.models.wrap.__module__ == "objcomm.models"
        assert "broadcast" in vars(objcomm)
        from objcomm import *
        assert all_reduce(3, "sum") == 3 and metrics.all_gather_scalar(2) == [2]
        """
    )
    run_python("import objcomm.compat.axolotl as a; assert a.UsageError.__module__ == 'objcomm'")


def test_a_compiled_function_may_be_the_first_to_use_a_name() -> None:
    run_python(
        """
        import torch, objcomm

        @torch.compile(backend="eager")
        def step(x):
            return objcomm.all_reduce(x + 1, "sum") * 2

        assert step(torch.ones(2)).tolist() == [4, 4]
        """
    )


@pytest.mark.parametrize(
    ("command", "option", "shown"),
    [
        ("objcomm", "--help", "usage: python -m objcomm"),
        ("objcomm.run", "--help", "usage: python -m objcomm.run"),
        ("objcomm", "--version", f"objcomm {objcomm.__version__}\n"),
    ],
)
def test_help_and_version_need_no_torch(command: str, option: str, shown: str) -> None:
    printed = run_python(
        f"""
        import runpy, sys
        sys.modules["torch"] = None  # cannot be imported
        sys.argv = ["python -m {command}", "{option}"]
        try:
            runpy.run_module({command!r}, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert end.code == 0
        """
    )
    assert printed.startswith(shown)


# Modules that are slow to import and serve only some calls, or none. Modules that torch itself
# imports need not be listed.
HEAVY = {
    "cloudpickle", "matplotlib", "numpy.testing", "objcomm.__main__", "objcomm._bootstrap.doctor",
    "objcomm._bootstrap.worker", "objcomm.compat", "objcomm.demo", "objcomm._observe.inspect",
    "prometheus_client", "sklearn", "tensorboard", "torch._dynamo", "torch._inductor",
    "torch.distributed.elastic", "torch.distributed.run", "torch.utils.tensorboard", "tqdm.auto",
}  # fmt: skip


def test_importing_loads_nothing_slow_starts_no_thread_and_joins_no_group() -> None:
    printed = run_python(
        f"""
        import signal, sys, threading, torch, torch.distributed
        before, handler = set(sys.modules), signal.getsignal(signal.SIGINT)
        import objcomm
        objcomm.broadcast
        print(*(name for name in {HEAVY!r} if name in set(sys.modules) - before))
        assert threading.active_count() == 1
        assert not torch.distributed.is_initialized()
        assert signal.getsignal(signal.SIGINT) is handler
        print(objcomm.__version__)
        """
    )
    assert printed.split() == [objcomm.__version__]


def test_importing_waits_for_no_collection_and_leaves_the_collector_as_it_was() -> None:
    """A collection of all of torch's objects takes longer than the import."""
    run_python(
        """
        import gc, sys, torch
        gc.collect()  # so that none is due before the import has begun
        is_done = []
        note = lambda *_: is_done.append(hasattr(sys.modules.get("objcomm._public"), "__all__"))
        gc.callbacks.append(note)
        import objcomm._public
        gc.callbacks.clear()
        assert all(is_done), is_done
        assert gc.isenabled()
        """
    )
    run_python("import gc; gc.disable(); import objcomm; objcomm.rank; assert not gc.isenabled()")
    run_python(
        """
        import gc, sys
        sys.modules["msgpack"] = None
        try:
            import objcomm._public
        except ImportError:
            assert gc.isenabled()
        else:
            raise AssertionError("there is a msgpack")
        """
    )


def test_numpy_is_not_needed() -> None:
    run_python(
        """
        import sys, warnings
        sys.modules["numpy"] = None
        warnings.simplefilter("ignore")  # torch tells of the missing numpy
        import torch
        warnings.simplefilter("error")
        import objcomm
        for codec in ("pickle", "msgpack"):
            sent = {"w": torch.arange(50_000), "tiny": torch.ones(2, dtype=torch.bfloat16)}
            sent.update(b=bytes(70_000), a=bytearray(70_000), n=2**70)
            got = objcomm.from_tensor(objcomm.to_tensor(sent, codec=codec))
            assert torch.equal(got["w"], sent["w"]) and torch.equal(got["tiny"], sent["tiny"])
            assert (got["b"], got["a"], got["n"]) == (sent["b"], sent["a"], sent["n"])
            got["w"][0] = 1
        assert objcomm.metrics.all_gather_scalar(0.5) == [0.5]
        assert objcomm.all_reduce(torch.ones(2), "sum").tolist() == [1, 1]
        assert objcomm.all_reduce(3, "mean") == 3.0
        assert objcomm.all_reduce({"w": [torch.ones(2), 1]}, "mean")["w"][1] == 1.0
        assert objcomm.all_reduce(torch.ones(2), "argmin").rank.tolist() == [0, 0]
        """
    )


def test_numpy_is_not_needed_by_the_links_of_one_host() -> None:
    run_python(
        """
        import sys, warnings
        sys.modules["numpy"] = None
        warnings.simplefilter("ignore")  # torch tells of the missing numpy
        from datetime import timedelta
        import socket
        import torch
        from objcomm._transport.link import payload_tag
        from objcomm._transport.streams import StreamLink
        ends, tag, limit = socket.socketpair(), payload_tag(0, 1), timedelta(seconds=300)
        links = [StreamLink(rank, {1 - rank: end}) for rank, end in enumerate(ends)]
        for sent in (torch.arange(9).to(torch.uint8), torch.empty(0, dtype=torch.uint8)):
            into = torch.zeros_like(sent)
            links[0].send(sent, 1, tag)
            links[1].wait(links[1].recv(into, 0, tag), limit)
            assert torch.equal(into, sent)
        """
    )


def test_a_torch_without_distributed_serves_a_world_of_one() -> None:
    run_python(
        """
        import importlib.abc, importlib.machinery, sys

        class WithoutDistributed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            '''Gives torch._C as a build without USE_DISTRIBUTED has it.'''

            def find_spec(self, name, path, target=None):
                if name != "torch._C":
                    return None
                spec = importlib.machinery.PathFinder.find_spec(name, path)
                self.loader, spec.loader = spec.loader, self
                return spec

            def create_module(self, spec):
                return self.loader.create_module(spec)

            def exec_module(self, module):
                self.loader.exec_module(module)
                for part in ("c10d", "rpc", "dist_autograd", "faulty_agent"):
                    if hasattr(module, f"_{part}_init"):
                        delattr(module, f"_{part}_init")

        sys.meta_path.insert(0, WithoutDistributed())
        import torch.distributed
        assert not torch.distributed.is_available()
        import objcomm
        mine = {"w": torch.ones(2)}
        assert objcomm.broadcast(mine) is mine
        assert objcomm.gather(mine)[0] is objcomm.all_gather(mine)[0] is mine
        assert objcomm.scatter([mine]) is mine
        assert objcomm.reduce(2) == objcomm.all_reduce(2, "max") == 2
        assert objcomm.reduce_and_broadcast(lambda: 2, sum) == 2
        assert objcomm.gather_scalar(2) == objcomm.metrics.all_gather_scalar(2) == [2]
        assert objcomm.ddp_broadcast(mine) is mine
        objcomm.barrier()
        from objcomm.compat import torch as dist_objects
        box = [mine]
        with dist_objects.patch():
            dist_objects.all_gather_object(box, "mine")
        assert box == ["mine"] and not hasattr(torch.distributed, "all_gather_object")
        from objcomm.compat import axolotl, flashy, speechbrain
        assert flashy.all_reduce(torch.ones(1)).tolist() == [1]
        assert axolotl.compute_and_broadcast(lambda: 5) == speechbrain.run_on_main(lambda: 5) == 5
        assert objcomm.run_on_main(lambda: mine) is objcomm.run_once_per_node(lambda: mine) is mine
        with objcomm.main_first(), objcomm.node_first():
            assert objcomm.broadcast(mine) is mine
        with axolotl.zero_only(), speechbrain.MainProcessContext():
            assert objcomm.broadcast(mine) is mine
        assert (objcomm.rank(), objcomm.world_size()) == (0, 1)
        assert objcomm.is_main() and not objcomm.is_initialized()
        assert torch.equal(objcomm.from_tensor(objcomm.to_tensor(mine))["w"], mine["w"])
        """
    )
