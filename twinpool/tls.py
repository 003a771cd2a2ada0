"""TLS for servers and clients, from files that may change while the process runs.

Servers look at their files' times at each new connection and take new ones over; files that cannot be read or do not
belong together (an update half done) leave the old ones in force, with a warning. Clients read their files when they
open a channel; sessions open a new one each time that they dial.
"""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from twinpool.config import Config, TlsSection
from twinpool.errors import ConfigError

log = logging.getLogger(__name__)

_Stamps = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's files; with ``client_ca`` it takes only clients that show a certificate of that authority."""

    cert: str
    key: str
    client_ca: str | None = None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files. Raises ConfigError: a file is missing or wrong."""
        follower = _Follower(self)

        def fetch() -> object | None:  # asked by gRPC before each handshake; None keeps what is in force
            return self._grpc_configuration() if follower.changed() else None

        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(), fetch, require_client_authentication=self.client_ca is not None
        )

    def http_context(self) -> ssl.SSLContext:
        """A context that follows the files. Raises ConfigError: a file is missing or wrong."""
        follower = _Follower(self)
        current = self.context()

        def refresh(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            nonlocal current
            if follower.changed():
                current = self.context()
            connection.context = current

        outer = self.context()
        outer.sni_callback = refresh
        return outer

    def context(self) -> ssl.SSLContext:
        """The files as they are now. Raises ConfigError: a file is missing or wrong."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise _unusable([self.cert, self.key, self.client_ca], error) from error
        return context

    def _grpc_configuration(self) -> object:
        chain = [(_read(self.key), _read(self.cert))]
        return grpc.ssl_server_certificate_configuration(chain, _read(self.client_ca) if self.client_ca else None)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client checks a server, and what it shows of itself.

    Args:
        ca: file of the authority that signed the server's certificate; None takes the system's authorities.
        cert: file with the client's own certificate chain, for servers that ask for one.
        key: file with its private key.
        server_name: name that the server's certificate must carry; None takes the host that is dialled.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials from the files as they are now. Raises ConfigError: a file is missing."""
        return grpc.ssl_channel_credentials(
            _read(self.ca) if self.ca else None,
            _read(self.key) if self.key else None,
            _read(self.cert) if self.cert else None,
        )

    @property
    def options(self) -> list[tuple[str, str]]:
        """Channel options."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def internal_server(section: TlsSection) -> ServerTls | None:
    """For ``worker.v1`` and ``kv.v1``: both sides show certificates; None without TLS."""
    return ServerTls(section.cert, section.key, section.ca) if section.cert and section.key else None


def internal_client(section: TlsSection) -> ClientTls | None:
    """For dialling workers; None without TLS."""
    if not section.is_internal:
        return None
    return ClientTls(section.ca, section.cert, section.key, section.server_name)


def public_server(section: TlsSection) -> ServerTls | None:
    """For the router's public ports; None without TLS."""
    cert, key = (section.public_cert, section.public_key) if section.public_cert else (section.cert, section.key)
    return ServerTls(cert, key, section.public_client_ca) if section.is_public and cert and key else None


def client_tls(config: Config) -> ClientTls | None:
    """For clients of a router: the ``client`` section, else what ``tls`` says of the router; None without TLS."""
    client, tls = config.client, config.tls
    if client.tls or client.tls_ca or client.tls_cert:
        return ClientTls(client.tls_ca, client.tls_cert, client.tls_key, client.tls_server_name)
    if not tls.is_public:
        return None
    name = client.tls_server_name or (None if tls.public_cert else tls.server_name)
    return ClientTls(tls.ca, tls.cert, tls.key, name)


class _Follower:
    """Says once for each change of a server's files that the new ones are to be used."""

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self._paths = [path for path in (files.cert, files.key, files.client_ca) if path is not None]
        files.context()
        self._stamps = self._look()

    def changed(self) -> bool:
        """Whether there are new files that can be used; never raises."""
        stamps = self._look()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self._files.context()
        except ConfigError as error:
            log.warning("the changed TLS files are not used: %s", error.message)
            return False
        log.info("new certificate from %s", self._files.cert)
        return True

    def _look(self) -> _Stamps:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unusable([path], error) from error


def _unusable(paths: list[str | None], error: OSError) -> ConfigError:
    names = ", ".join(path for path in paths if path is not None)
    return ConfigError(
        f"TLS files cannot be used ({names}): {error.strerror or error}; give readable PEM files, the key unencrypted "
        "and belonging to the certificate"
    )
