"""Beyond loopback a server speaks TLS, and is known by the fingerprint of its own authority."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from phalanx.control.client.client import Client, ClientError
from phalanx.control.trust import certificates
from phalanx.control.trust.certificates import CERTIFICATE_FILE, KEY_FILE, Authority
from phalanx.control.trust.tls import TlsError, advice, kept_authority, trusting_pinned
from tests.commands import run_phalanx
from tests.control.servers import ServerProcess
from tests.security.agents import RootAgent, wait_for


class WideServer(ServerProcess):
    """A server that others could reach: asked through its own authority."""

    def __init__(self, state: Path, *options: str) -> None:
        super().__init__(state, "--host", "0.0.0.0", *options)
        self.url = f"https://127.0.0.1:{self.port}"

    def wait(self, seconds: float = 60.0) -> None:
        def led() -> bool:
            assert self.process is not None and self.process.poll() is None, self.output()
            return "add a node" in self.output()

        assert wait_for(led, seconds), self.output()

    @property
    def fingerprint(self) -> str:
        return self.output().split("--fingerprint ")[1].split()[0]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> WideServer:  # type: ignore[misc]
    with WideServer(tmp_path_factory.mktemp("wide")) as running:
        yield running  # type: ignore[misc]


def test_the_server_speaks_tls_only_and_its_own_commands_trust_it(
    wide: WideServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PHALANX_CA", "PHALANX_FINGERPRINT", "PHALANX_SERVER", "PHALANX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    client = Client(state=wide.state)
    assert client.get("/v1/status", dict)["leader"]
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(wide.url.replace("https", "http") + "/healthz", timeout=10)
    with pytest.raises(urllib.error.URLError) as unknown:
        urllib.request.urlopen(wide.url + "/healthz", timeout=10)
    assert isinstance(unknown.value.reason, ssl.SSLCertVerificationError)
    assert "--fingerprint" in advice(unknown.value.reason, wide.url)


def test_a_client_elsewhere_trusts_a_fingerprint_and_remembers_it(
    wide: WideServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PHALANX_TOKEN", wide.admin())
    monkeypatch.delenv("PHALANX_CA", raising=False)
    wrong = "sha256:" + "0" * 64
    monkeypatch.setenv("PHALANX_FINGERPRINT", wrong)
    with pytest.raises(ClientError, match="shows the fingerprint sha256:"):
        Client(wide.url, tmp_path / "elsewhere")
    monkeypatch.setenv("PHALANX_FINGERPRINT", wide.fingerprint)
    assert Client(wide.url, tmp_path / "elsewhere").get("/v1/status", dict)["leader"]
    monkeypatch.delenv("PHALANX_FINGERPRINT")  # once is enough
    assert Client(wide.url, tmp_path / "elsewhere").get("/v1/status", dict)["leader"]
    assert kept_authority(wide.url, tmp_path / ".phalanx" / "authorities").exists()


def test_an_agent_joins_by_the_fingerprint_that_the_server_prints(
    wide: WideServer, tmp_path: Path
) -> None:
    options = ("--as-agent", "--no-standby", "--fingerprint")
    with RootAgent(wide, tmp_path, "pinned", *options, wide.fingerprint) as agent:
        assert wait_for(lambda: "joined as node" in agent.log()), agent.log()
    with RootAgent(wide, tmp_path, "wrong", *options, "sha256:" + "0" * 64) as agent:
        assert wait_for(lambda: not agent.alive()), agent.log()
        assert "shows the fingerprint" in agent.log()


def test_plain_http_beyond_loopback_needs_to_be_asked_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "s", "--host", "0.0.0.0", "--plain-http") as server:
        assert server.call("GET", "/v1/status")[0] == 200
        assert "travel in the clear" in server.output()
    mixed = ["--host", "0.0.0.0", "--url", "http://a.example:7070", "--state", str(tmp_path)]
    done = run_phalanx("up", *mixed, seconds=60)
    assert done.returncode == 2 and "--plain-http" in done.stderr


def test_a_pair_of_servers_has_one_authority_and_each_its_certificate(tmp_path: Path) -> None:
    seed = bytes(range(32))
    one, other = Authority(seed), Authority(seed)
    assert one.fingerprint == other.fingerprint != Authority(bytes(32)).fingerprint
    for folder, authority in ((tmp_path / "a", one), (tmp_path / "b", other)):
        folder.mkdir()
        certificates.write_certificate(authority, folder, ("a.example", "10.0.0.1"))
        assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600
    trust = ssl.create_default_context(cadata=one.pem)  # the one's authority trusts the other
    leaf = x509.load_pem_x509_certificates((tmp_path / "b" / CERTIFICATE_FILE).read_bytes())[0]
    ca = x509.load_der_x509_certificate(trust.get_ca_certs(binary_form=True)[0])
    leaf.verify_directly_issued_by(ca)


def test_a_standby_shows_a_certificate_of_the_same_authority(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "phx_read_x")
    with WideServer(tmp_path / "a", "--store", postgres_url) as first:
        second = WideServer(tmp_path / "b", "--store", postgres_url)
        second.start(wait=False)
        try:
            assert wait_for(lambda: "stands by:" in second.output(), 60), second.output()
            for server in (first, second):
                kept = tmp_path / f"{server.port}.pem"
                trust = trusting_pinned(server.url, first.fingerprint, kept)
                health = urllib.request.urlopen(f"{server.url}/healthz", timeout=10, context=trust)
                assert health.status == 200
        finally:
            second.kill()


def test_a_certificate_is_renewed_before_its_end_and_for_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, hosts = Authority(bytes(32)), ("a.example",)
    assert not certificates.is_current(authority, tmp_path, hosts)
    certificates.write_certificate(authority, tmp_path, hosts)
    assert certificates.is_current(authority, tmp_path, hosts)
    assert not certificates.is_current(authority, tmp_path, ("b.example",))
    assert not certificates.is_current(Authority(b"1" * 32), tmp_path, hosts)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=certificates.DAYS - 10)

    monkeypatch.setattr(certificates, "datetime", Later)
    assert not certificates.is_current(authority, tmp_path, hosts)


def test_what_is_no_fingerprint_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match="is no fingerprint"):
        trusting_pinned("https://127.0.0.1:1", "abc", tmp_path / "ca.pem")
