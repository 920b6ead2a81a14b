"""What ``coati_perf.exchange.torch_store`` leans on in torch; a release that changes it fails here.

Everything runs over a real TCPStore on the loopback interface.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from coati_perf.exchange import torch_store


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def own_client(store, prefix):
    client = torch_store.connect_to_job(store, prefix)
    client.flush(20)
    return client


@pytest.fixture
def group(tmp_path):
    """Return a maker of a process group of this one process."""

    def make(**options):
        dist.init_process_group("gloo", rank=0, world_size=1, **options)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_private_default_store_is_that_of_the_process_group(server, group):
    group(store=server)
    store = torch_store.job_store()
    store.set("from_the_group", b"1")
    assert [key for key in server.list_keys() if key.endswith("from_the_group")]
    assert torch_store.is_tcp(store)


def test_a_job_without_a_process_group_has_no_store():
    with pytest.raises(ValueError, match="has not been initialized"):
        torch_store.job_store()


def test_a_file_store_is_told_from_a_tcp_store_below_its_prefixes(server, tmp_path):
    file_store = FileStore(str(tmp_path / "store"), 1)
    assert not torch_store.is_tcp(PrefixStore("a", PrefixStore("b", file_store)))
    assert not torch_store.is_tcp(HashStore())
    assert torch_store.is_tcp(PrefixStore("a", PrefixStore("b", server)))
    assert torch_store.is_tcp(server)


def test_the_store_below_a_prefix_is_seen(server):
    assert PrefixStore("a", server).underlying_store is server


def test_a_port_of_0_is_a_free_port_that_can_be_asked_for(server):
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert 0 < server.port != other.port > 0


def test_a_clone_keeps_its_prefixes(server):
    """Else keys of an attempt that the launcher restarted would meet those of the next one."""
    store = PrefixStore("attempt_1", server)
    own_client(store, "ours").set("key", b"value")
    assert PrefixStore("ours", store).get("key") == b"value"
    assert own_client(store, "ours").get("key") == b"value"


@pytest.mark.parametrize("prefixed", [False, True])
def test_a_clone_does_not_wait_with_the_store_it_is_of(server, prefixed):
    """A ``set`` on the very object on which another thread waits in ``get`` waits with it."""
    server.set_timeout(timedelta(seconds=20))
    store = PrefixStore("job", server) if prefixed else server
    client = own_client(store, "ours")
    waiting = threading.Thread(target=store.get, args=("late",))
    waiting.start()
    try:
        time.sleep(0.1)
        began = time.monotonic()
        client.set("key", b"value")
        assert client.check(["key"])
        assert time.monotonic() - began < 0.1
        assert waiting.is_alive()
    finally:
        other = server.clone()
        other.set("job/late" if prefixed else "late", b"")
        waiting.join(20)
    assert not waiting.is_alive()


def test_the_timeout_of_a_clone_is_its_own(server):
    before = server.timeout
    own_client(server, "ours")
    assert server.timeout == before


def test_set_does_not_wait_for_an_answer():
    """A server that accepts and never answers, as one that has stalled, holds up no ``set``."""
    relay, client = stalled_client()
    try:
        began = time.monotonic()
        for number in range(100):
            client.set(f"key{number}", b"x" * 1000)
        assert time.monotonic() - began < 0.5
    finally:
        relay.stop()


def test_check_and_delete(server):
    store = PrefixStore("p", server)
    store.set("a", b"1")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])
    assert server.num_keys() == 0


def test_check_does_not_wait(server):
    began = time.monotonic()
    assert not server.check(["never"])
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    "value", [b"", b"\x00", b"\xff\xfe\x00\x00\x80", bytes(range(256)), b"\xff" * 100_000]
)
def test_bytes_come_back_as_they_went(server, value):
    store = own_client(server, "p")
    store.set("key", value)
    assert own_client(server, "p").get("key") == value


def test_a_late_client_keeps_what_is_written_before_it_is_connected(server):
    """Nothing waits for rank 0; once it is there, all comes in the order it was written in."""
    job = PrefixStore("job", server)
    began = time.monotonic()
    client = torch_store.connect_to_served(job, "fit")
    client.set("key", b"first")
    client.set("key", b"second")
    assert time.monotonic() - began < 0.2
    own = torch_store.serve(job, "fit")
    reader = own
    deadline = time.monotonic() + 10
    reader.flush(20)
    while not reader.check(["key"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    client.set("later", b"third")
    assert (reader.get("key"), reader.get("later")) == (b"second", b"third")


def test_a_late_client_says_why_it_could_not_connect(server):
    job = PrefixStore("job", server)
    PrefixStore("fit", job).set("address", "127.0.0.1:no-port")
    client = torch_store.connect_to_served(job, "fit")

    def write_until_it_is_refused():
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            client.set("key", b"value")
            time.sleep(0.01)

    with pytest.raises(ValueError, match="no-port"):
        write_until_it_is_refused()


class StallingRelay(threading.Thread):
    """Passes bytes between a client and a server until told to stall."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._server_port = port
        self.stalled = threading.Event()
        self._over = threading.Event()

    def run(self):
        down, _ = self._listener.accept()
        up = socket.create_connection(("127.0.0.1", self._server_port))
        with down, up, self._listener:
            down.settimeout(0.01)
            up.settimeout(0.01)
            while not self._over.is_set():
                for source, target in ((down, up), (up, down)):
                    if not self.stalled.is_set():
                        try:
                            target.sendall(source.recv(65536))
                        except TimeoutError:
                            continue
                if self.stalled.is_set():
                    self._over.wait(0.01)

    def stop(self):
        self._over.set()
        self.join(10)


def stalled_client():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = StallingRelay(server.port)
    relay.start()
    client = TCPStore("127.0.0.1", relay.port, is_master=False)
    client.set("key", b"value")
    assert client.get("key") == b"value"
    relay.stalled.set()
    relay.server = server
    return relay, client
