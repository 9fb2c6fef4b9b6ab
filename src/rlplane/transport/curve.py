"""Messages from other machines: encrypted, and only from those who have the secret (CurveZMQ).

The address that is handed on has all that the other side needs: ``curve://SERVER:CLIENT@host:port``, where
SERVER is the key by which the server is known, and CLIENT the secret key by which it knows its clients. It
belongs into no log.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from rlplane.errors import ConfigError

SCHEME = "curve"
_ADDRESS = re.compile(r"curve://([0-9a-f]{64}):([0-9a-f]{64})@(.+:\d+)", re.ASCII)
_HANDSHAKE_MS = 10_000


class Address(NamedTuple):
    """What a client needs: where the server is, and two keys, in ZeroMQ's own notation."""

    server_public: bytes
    client_secret: bytes
    place: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address. Raises ``ConfigError``, which does not show it."""
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise ConfigError(f"address {without_secret(text)!r} must be curve://KEY:KEY@HOST:PORT")
        server, client = (z85.encode(bytes.fromhex(part)) for part in found.groups()[:2])
        return cls(server, client, found[3])

    def __str__(self) -> str:
        keys = (z85.decode(key).hex() for key in self[:2])
        return f"{SCHEME}://{':'.join(keys)}@{self.place}"


def without_secret(address: str) -> str:
    """The address as it may be shown to anybody."""
    return re.sub(r"(?<=^curve://).*@", "…@", address)


def prepare_client(socket: zmq.Socket[Any], address: str) -> str:
    """Give a socket the keys of an address, if it has any; what to connect it to."""
    if not address.startswith(f"{SCHEME}://"):
        return address
    keys = Address.parse(address)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(keys.client_secret))
    return f"tcp://{keys.place}"


class Doorman:
    """Opens an encrypted door to a socket, and lets in those who have the client's key.

    Doors that the socket has already are not changed by it.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._server_public, server_secret = zmq.curve_keypair()
        self._client_public, self._client_secret = zmq.curve_keypair()
        # It has to be there first: without it, libzmq lets in whoever knows the server's key.
        self._authenticator = ThreadAuthenticator(socket.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)

    def bind(self, host: str) -> str:
        """Listen on a port of ``host``; the address for clients."""
        name = f"[{host}]" if ":" in host else host
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        port = self._socket.bind_to_random_port(f"tcp://{name}")
        return str(Address(self._server_public, self._client_secret, f"{name}:{port}"))

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the authenticator about the key of a client."""
        return key == self._client_public

    def close(self) -> None:
        """End the authenticator, after the socket."""
        self._authenticator.stop()
