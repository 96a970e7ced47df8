"""Rank 0 answers requests of all ranks, and a rank gives up on an answer that takes too long.

A rank sends one request at a time. Each answer has its own tag, so a late answer is not mistaken
for the next one. Rank 0 sends requests too, so the program also runs alone.

    torchrun --nproc-per-node 4 examples/request_reply_server.py
    python examples/request_reply_server.py
"""

import asyncio
import itertools

import objcomm

SERVER = 0  # a rank
REQUEST = 0  # a tag; answers have tags from 1 up
SETTINGS = {"lr": 0.1, "warmup": 500, "layers": (64, 10), "seed": 7}
TAKES = {"lr": 0.0, "warmup": 3600.0, "layers": 0.01, "seed": 0.01}  # seconds, on the server
WAITS = {"lr": 60.0, "warmup": 0.2, "layers": 60.0, "seed": 60.0}  # seconds, on the client


async def answer(client: int, tag: int, name: str) -> None:
    """Look up a setting and send it."""
    await asyncio.sleep(TAKES[name])
    # Does not wait for the client, which may have given up: answers of up to 32 KiB are buffered.
    await objcomm.isend(SETTINGS[name], client, tag=tag)


async def serve() -> None:
    """Answer each request in a separate task until all ranks have left."""
    clients = set(range(objcomm.world_size()))
    answers: dict[int, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while clients:
            request = objcomm.irecv(tag=REQUEST)  # from any rank
            question = await request
            client = request.envelope.src
            if client in answers:
                answers.pop(client).cancel()  # it no longer waits for the previous one
            if question is None:
                clients.remove(client)
            else:
                answers[client] = tasks.create_task(answer(client, *question))


async def ask(tag: int, name: str, seconds: float) -> object:
    """Return the server's answer, or None if it takes longer than `seconds`."""
    reply = objcomm.irecv(SERVER, tag=tag)
    await objcomm.isend((tag, name), SERVER, tag=REQUEST)
    try:
        async with asyncio.timeout(seconds):
            return await reply
    except TimeoutError:
        return None if reply.cancel() else await reply  # False: it is already arriving


async def run() -> dict[str, object]:
    """Request this rank's part of the settings; on rank 0, also serve."""
    tags, found = itertools.count(1), {}
    async with asyncio.TaskGroup() as tasks:
        if objcomm.rank() == SERVER:
            tasks.create_task(serve())
        for name in list(WAITS)[objcomm.rank() :: objcomm.world_size()]:
            found[name] = await ask(next(tags), name, WAITS[name])
        await objcomm.isend(None, SERVER, tag=REQUEST)
    return found


def main() -> None:
    """Run the server and its clients, and print what all ranks have received."""
    found = objcomm.reduce(asyncio.run(run()), "union")
    if found is not None:
        print(*(f"{name}: {found[name]}" for name in WAITS), sep=", ")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
