from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.system.errors import ConfigError
from serve.security import CertificatePair, Tls

from . import certificates

Certify = Callable[[str], CertificatePair]


@pytest.fixture
def certify(tmp_path: Path) -> Certify:
    def make(name: str) -> CertificatePair:
        (tmp_path / name).mkdir()
        return certificates.make(tmp_path / name, name)

    return make


def test_a_key_of_another_certificate_is_refused(certify: Certify) -> None:
    first, second = certify("first"), certify("second")
    with pytest.raises(ConfigError, match=r"serve.tls_certificate .*first.*: cannot be used: .*(?i:mismatch)"):
        Tls(CertificatePair(first.certificate, second.key))


def test_missing_file_is_named(certify: Certify) -> None:
    with pytest.raises(ConfigError, match=r"absent: cannot be used: .*No such file"):
        Tls(CertificatePair(certify("first").certificate, Path("absent")))


def test_key_with_a_password_is_refused_without_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the key has a password"):
        Tls(certificates.make(tmp_path, "locked", "-passout", "pass:secret"))


def test_certificate_without_its_new_key_changes_nothing(certify: Certify) -> None:
    pair, other = certify("first"), certify("second")
    tls = Tls(pair)
    whole = pair.certificate.read_bytes()
    pair.certificate.write_bytes(other.certificate.read_bytes())
    with pytest.raises(ConfigError):
        tls.reload()
    for context in (tls.context, tls.grpc_context):
        client, _ = shake_hands(context)
        assert client.getpeercert(binary_form=True) == ssl.PEM_cert_to_DER_cert(whole.decode())
    pair.certificate.write_bytes(whole)
    tls.reload()


def test_tls_below_1_2_is_refused(certify: Certify) -> None:
    assert Tls(certify("first")).context.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(("offered", "agreed"), [(["h2"], "h2"), (["h2", "http/1.1"], "h2"), (["http/1.1"], None)])
def test_grpc_port_negotiates_h2_only(certify: Certify, offered: list[str], agreed: str | None) -> None:
    ends = shake_hands(Tls(certify("first")).grpc_context, offered)
    assert [end.selected_alpn_protocol() for end in ends] == [agreed, agreed]


def shake_hands(context: ssl.SSLContext, offered: Sequence[str] = ()) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Return both ends of a connection, the client's first."""
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    if offered:
        client.set_alpn_protocols(offered)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), context.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends
