"""Your own transport: messages between ranks over TCP sockets, and a training run that uses it.

    penstock run --ranks 2 examples/transport_tcp.py            # over these sockets
    penstock run --ranks 2 examples/transport_tcp.py --auto     # over Penstock's own transport: the same figures

Each pair of ranks has one connection. At each end a thread reads whatever arrives, so that no send waits for its
receive. Collectives still go through `torch.distributed`. A toy: it pickles every tensor and works on one machine only.
"""

import argparse
import contextlib
import pickle
import socket
import struct
import threading

import torch
from torch import nn

import penstock
from penstock.runtime.transport import Agreement, from_bytes, to_bytes

LENGTH = struct.Struct("<Q")


class Sockets:
    """One rank's side of the transport: a `PointToPoint`."""

    def __init__(self, endpoint):
        self.rank, self.device = endpoint.rank, endpoint.device
        self.connections, self.channels = {}, []
        self.mail, self.gone, self.arrival = {}, set(), threading.Condition()
        with socket.create_server(("127.0.0.1", 0)) as door:
            ports = endpoint.gather(door.getsockname()[1])  # now all ranks are listening
            for peer in range(self.rank):
                self.connections[peer] = socket.create_connection(("127.0.0.1", ports[peer]))
                self.connections[peer].sendall(LENGTH.pack(self.rank))
            while len(self.connections) < endpoint.ranks - 1:
                connection, _ = door.accept()
                self.connections[LENGTH.unpack(exactly(connection, LENGTH.size))[0]] = connection
        for peer in self.connections:
            threading.Thread(target=self.read, args=(peer,), daemon=True).start()

    def read(self, peer):
        """A thread's main loop: stores what arrives from a rank for `take` to find."""
        try:
            while True:
                (length,) = LENGTH.unpack(exactly(self.connections[peer], LENGTH.size))
                key, message = pickle.loads(exactly(self.connections[peer], length))
                with self.arrival:
                    self.mail.setdefault(key, []).append(message)
                    self.arrival.notify_all()
        except OSError:  # the other rank has closed or died
            with self.arrival:
                self.gone.add(peer)
                self.arrival.notify_all()
            self.connections[peer].close()

    def take(self, peer, key):
        with self.arrival:
            self.arrival.wait_for(lambda: self.mail.get(key) or peer in self.gone)
            if not self.mail.get(key):
                raise ConnectionError(f"rank {peer} closed its connection")
            return self.mail[key].pop(0)

    def put(self, peer, key, message):
        data = pickle.dumps((key, message))
        self.connections[peer].sendall(LENGTH.pack(len(data)) + data)

    def connect(self, source_rank, target_rank):
        """Nothing to do: all ranks are connected."""

    def channel(self, number, link, source_rank, target_rank, *, backward):
        peer = target_rank if source_rank == self.rank else source_rank
        self.channels.append(Channel(self, peer, link, (number, link, backward)))
        return self.channels[-1]

    def release(self, number):
        self.channels = [channel for channel in self.channels if channel.key[0] != number]

    def end_step(self):
        for channel in self.channels:
            channel.agreement.end_step()

    def drop_step(self):
        """Nothing to do: between processes no step follows one that raised."""

    def close(self):
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # the other end may be gone
                connection.shutdown(socket.SHUT_WR)  # what was sent still arrives, then EOF


class Channel:
    """One link's messages to or from one other rank."""

    def __init__(self, sockets, peer, link, key):
        self.sockets, self.peer, self.key = sockets, peer, key
        self.agreement = Agreement(link)

    def send(self, microbatch, message):
        layouts = self.agreement.check(microbatch, message)
        parts = [None if t is None else (layout, to_bytes(t)) for layout, t in zip(layouts, message, strict=True)]
        self.sockets.put(self.peer, (self.key, microbatch), parts)

    def post(self, microbatch):
        """Nothing to do: a thread receives."""

    def receive(self, microbatch):
        parts = self.sockets.take(self.peer, (self.key, microbatch))
        return [part and from_bytes(part[1], part[0], self.sockets.device) for part in parts]


def exactly(connection, size):
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the other end closed")
        data += more
    return data


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--auto", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 1))
    x = torch.randn(32, 16)
    transport = "auto" if options.auto else Sockets
    loss_fn = nn.functional.mse_loss
    with penstock.pipeline(model, (x,), loss_fn=loss_fn, microbatches=4, transport=transport) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for step in range(1, 6):
            result = pipe.step(x, target=x.sum(1, keepdim=True))
            optimizer.step()
            optimizer.zero_grad()
            if pipe.is_main_process:
                print(f"step {step}  loss {float(result.loss).hex()}", flush=True)


if __name__ == "__main__":
    main()
