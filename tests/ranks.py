"""Programs that ranks run together: spawned once for a number of processes, they save what they got by name."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(programs: dict, world: int, folder) -> list[dict]:
    """Run programs (name → picklable function of the rank, without result or with tensors) on `world` gloo processes.

    Returns, for each rank, name → what its program returned. A program that raises fails the whole run with its
    traceback.
    """
    mp.spawn(_work, (programs, world, free_port(), folder), nprocs=world)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]


def _work(rank, programs, world, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        got = {name: program(rank) for name, program in programs.items()}
        torch.save(got, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
