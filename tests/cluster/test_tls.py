"""TLS at a router's port and between peers, over real sockets: who is let in, and files that are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import shutil
import ssl
import sys

import grpc
import pytest
from dendro.certificates import ROLES, CertificateFiles
from dendro.client import AsyncClient, Client
from dendro.errors import BadRequest, PeerLost, Unauthenticated
from dendro.servicer import DRAFTER_REPLICA, VERIFIER_REPLICA, serve_engine

from cluster.api.access_files import access_problems
from cluster.api.callers import Callers
from cluster.api.grpc import serve_router
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.config import Config
from cluster.peers.stream import DRAFTER, VERIFIER, PeerStream
from cluster.router.allowance import KeyLimits
from cluster.serve_config import APPLICATION
from tests.support.certificates import Authority
from tests.support.deployed import use_deployed
from tests.support.edge import EdgePeers, config, ingress
from tests.support.fakes import FakeDrafter, FakeVerifier, plain
from tests.support.toy_cluster import LOADERS, toy_config

KINDS = {"drafter": (DRAFTER, DRAFTER_REPLICA, FakeDrafter), "verifier": (VERIFIER, VERIFIER_REPLICA, FakeVerifier)}


@contextlib.asynccontextmanager
async def router(**sections):
    server = await serve_router(ingress(EdgePeers(), **sections))
    try:
        yield server.address
    finally:
        await server.stop()


async def answers(address, credentials, timeout_s=20.0, **options):
    """Whether a call is answered. One whose connection is refused is repeated until its time is over."""
    async with AsyncClient(address, credentials=credentials, timeout_s=timeout_s, **options) as client:
        try:
            return bool((await client.generate_text("walk ", max_new_tokens=2)).token_ids)
        except PeerLost:
            return False


async def refuses(address, credentials):
    """Whether a call has no answer within a second."""
    return not await answers(address, credentials, timeout_s=1.0)


def pem(path):
    return path.read_bytes()


async def test_a_router_with_a_certificate_answers_over_tls_alone(tmp_path):
    authority = Authority(tmp_path)
    async with router(tls={"clients": authority.issue("router", "127.0.0.1")}) as address:
        trusting = grpc.ssl_channel_credentials(pem(authority.path))
        assert await answers(address, trusting)
        with Client(address, credentials=trusting) as blocking:
            assert await asyncio.to_thread(blocking.models)
        other = Authority(tmp_path, "other")
        assert await refuses(address, grpc.ssl_channel_credentials(pem(other.path)))
        assert await refuses(address, None)


async def test_a_router_takes_a_new_certificate_without_a_restart_and_keeps_the_last_that_works(tmp_path):
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    files = old.issue("router", "127.0.0.1")
    async with router(tls={"clients": files}) as address:
        assert await answers(address, grpc.ssl_channel_credentials(pem(old.path)))
        fresh = new.issue("fresh", "127.0.0.1")
        shutil.copy(fresh["certificate"], files["certificate"])  # without its key: nothing changes
        assert await answers(address, grpc.ssl_channel_credentials(pem(old.path)))
        shutil.copy(fresh["key"], files["key"])
        assert await answers(address, grpc.ssl_channel_credentials(pem(new.path)))
        assert await refuses(address, grpc.ssl_channel_credentials(pem(old.path)))


async def test_gateways_need_a_certificate_and_name_the_tenant(tmp_path):
    own, theirs = Authority(tmp_path, "own"), Authority(tmp_path, "theirs")
    gateway = theirs.issue("gateway", "gateway.example")
    tls = {"clients": own.issue("router", "127.0.0.1") | {"gateways": theirs.path}}
    async with router(tls=tls, grpc={"host": "0.0.0.0"}) as address:
        known = grpc.ssl_channel_credentials(pem(own.path), pem(gateway["key"]), pem(gateway["certificate"]))
        assert await answers(address, known, tenant="any")
        assert await refuses(address, grpc.ssl_channel_credentials(pem(own.path)))
    assert Callers(config(tls=tls, grpc={"host": "0.0.0.0"})).caller([("dendro-tenant", "t")]).tenant == "t"


@contextlib.asynccontextmanager
async def replica(role, certificates):
    _, served, engine = KINDS[role]
    running = await serve_engine(served, engine(), certificates=certificates)
    try:
        yield running.address
    finally:
        await running.stop()


def files_of(authority, role, **dates):
    pair = authority.issue("-".join((authority.path.stem, role, *dates)), f"{role}.dendro", **dates)
    return CertificateFiles(f"tls.peers.{role}", pair["certificate"], pair["key"], authority.path)


async def greets(address, kind, certificates):
    try:
        stream = await PeerStream.connect(address, kind, certificates)
    except PeerLost:
        return False
    await stream.close()
    return True


@pytest.mark.parametrize("role", ["drafter", "verifier"])
async def test_peers_know_each_other_by_the_role_in_their_certificate(tmp_path, role):
    """Not a router: one without a certificate, one of another authority, and another drafter or verifier. A drafter
    answers verifiers, too."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    kind = KINDS[role][0]
    async with replica(role, files_of(authority, role)) as address:
        assert await greets(address, kind, files_of(authority, "router"))
        assert not await greets(address, kind, None)
        assert not await greets(address, kind, files_of(other, "router"))
        for own in ("drafter", "verifier"):
            assert await greets(address, kind, files_of(authority, own)) is (role == "drafter" and own == "verifier")


PAST, FUTURE = datetime.datetime(2020, 1, 2), datetime.datetime(2098, 1, 1)


@pytest.mark.parametrize("role", ["drafter", "verifier"])
@pytest.mark.parametrize("dates", [{"end": PAST}, {"begin": FUTURE}], ids=["expired", "not yet valid"])
async def test_a_certificate_of_another_time_is_taken_from_no_peer(tmp_path, role, dates):
    authority, kind = Authority(tmp_path), KINDS[role][0]
    good, bad = files_of(authority, "router"), files_of(authority, "router", **dates)
    async with replica(role, files_of(authority, role)) as address:
        assert await greets(address, kind, good) and not await greets(address, kind, bad)
    async with replica(role, files_of(authority, role, **dates)) as address:
        assert not await greets(address, kind, good)


@pytest.mark.parametrize("role", ["drafter", "verifier"])
async def test_a_router_with_a_certificate_sends_nothing_to_a_peer_without_one_or_of_another_authority(tmp_path, role):
    authority, kind = Authority(tmp_path), KINDS[role][0]
    for certificates in (None, files_of(Authority(tmp_path, "other"), role)):
        async with replica(role, certificates) as address:
            assert not await greets(address, kind, files_of(authority, "router"))


@pytest.mark.parametrize("role", ["drafter", "verifier"])
async def test_peers_take_new_certificates_of_a_new_authority_without_a_restart(tmp_path, role):
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    kind, written = KINDS[role][0], {}
    for each in ("router", role):
        written[each] = old.issue(each, f"{each}.dendro") | {"authority": tmp_path / f"{each}-authority.pem"}
        shutil.copy(old.path, written[each]["authority"])
    files = {
        each: CertificateFiles(f"tls.peers.{each}", its["certificate"], its["key"], its["authority"])
        for each, its in written.items()
    }
    of_old, of_new = files_of(old, "router"), files_of(new, "router")
    async with replica(role, files[role]) as address:
        assert await greets(address, kind, files["router"]) and not await greets(address, kind, of_new)
        for each, its in written.items():
            for part, path in (new.issue(f"new-{each}", f"{each}.dendro") | {"authority": new.path}).items():
                shutil.copy(path, its[part])
        assert await greets(address, kind, files["router"]), "both sides have read their new files"
        assert await greets(address, kind, of_new) and not await greets(address, kind, of_old)


@pytest.mark.parametrize(("role", "poses_as"), [("drafter", "verifier"), ("verifier", "drafter")])
async def test_a_router_takes_no_drafter_for_a_verifier(tmp_path, role, poses_as):
    authority = Authority(tmp_path)
    async with replica(poses_as, files_of(authority, role)) as address:
        assert not await greets(address, KINDS[poses_as][0], files_of(authority, "router"))


async def test_an_http_server_takes_a_new_certificate_without_a_restart(tmp_path):
    """`ssl_context` of the same files, in asyncio's own server."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    pair = old.issue("router", "127.0.0.1")
    files = CertificateFiles("tls.clients", pair["certificate"], pair["key"])

    async def closed(reader, writer):
        writer.close()

    async def connects(authority):
        context = ssl.create_default_context(cafile=str(authority.path))
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        except ssl.SSLError:
            return False
        writer.close()
        return True

    async with await asyncio.start_server(closed, "127.0.0.1", 0, ssl=files.ssl_context()) as server:
        port = server.sockets[0].getsockname()[1]
        assert await connects(old) and not await connects(new)
        fresh = new.issue("fresh", "127.0.0.1")
        for part in ("certificate", "key"):
            shutil.copy(fresh[part], pair[part])
        assert await connects(new) and not await connects(old)


def test_files_that_cannot_be_used_are_refused_by_their_field(tmp_path):
    authority = Authority(tmp_path)
    one, two = authority.issue("one", "router.dendro"), authority.issue("two", "x")
    with pytest.raises(BadRequest, match=r"tls\.clients: there is no file"):
        CertificateFiles("tls.clients", tmp_path / "none", one["key"])
    with pytest.raises(BadRequest, match=r"tls\.clients: .*one\.crt cannot be used"):
        CertificateFiles("tls.clients", one["certificate"], two["key"])
    pair = {name: path.name for name, path in one.items()}
    sections = {"authority": authority.path.name, "router": pair, "drafter": pair, "verifier": pair | {"key": "gone"}}
    found = Config.of({"targets": {"demo": {"checkpoint": "x"}}, "tls": {"peers": sections}}, tmp_path)
    assert found.tls.peers is not None and found.tls.peers.router.key == one["key"], "relative to the file's folder"
    assert [str(each) for each in access_problems(found)] == [
        f"tls.peers.verifier: there is no file {tmp_path / 'gone'}"
    ]


def test_nobody_is_asked_for_the_password_of_a_key(tmp_path):
    """A router that reads a new key would wait for the answer."""
    locked = Authority(tmp_path).issue("locked", "x", password="secret")
    terminal, kept = os.pipe(), os.dup(0)
    os.write(terminal[1], b"secret\n")
    os.dup2(terminal[0], 0)
    try:
        with pytest.raises(BadRequest, match=r"tls\.clients: .*locked\.crt cannot be used"):
            CertificateFiles("tls.clients", locked["certificate"], locked["key"])
    finally:
        os.dup2(kept, 0)
        for each in (*terminal, kept):
            os.close(each)


def test_gateways_and_keys_exclude_each_other(tmp_path):
    clients = Authority(tmp_path).issue("router", "x") | {"gateways": "ca.crt"}
    for auth in ("none", {"keys": "keys.json"}):
        with pytest.raises(ValueError, match="auth: is set beside"):
            config(tls={"clients": clients}, auth=auth)


@pytest.mark.cluster
@pytest.mark.timeout(300)  # starting Ray alone may take more than 100 s beside another test's Ray
def test_a_cluster_on_serve_has_keys_and_tls_between_all_of_its_parts(tmp_path, monkeypatch):
    """An answer with drafted trees. No replica answers without a router's certificate, and no router without a key."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    authority = Authority(tmp_path)
    tls = {
        "clients": authority.issue("front", "127.0.0.1"),
        "peers": {"authority": authority.path} | {role: authority.issue(role, f"{role}.dendro") for role in ROLES},
    }
    text, key = new_key("alice", "alice", KeyLimits())
    write_keys(tmp_path / "keys.json", ApiKeys(keys=(key,)))
    checked = toy_config(auth={"keys": tmp_path / "keys.json"}, tls=tls)

    async def use(address: str) -> None:
        from ray import serve

        credentials = grpc.ssl_channel_credentials(pem(authority.path))
        async with AsyncClient(address, key=text, credentials=credentials, proxy=False) as client:
            accepted = 0
            async with asyncio.timeout(60):  # a busy machine may answer 50 tokens before the drafter is leased
                while not accepted:
                    done = await client.generate_text([5, 6, 7], max_new_tokens=50, speculation="(1,1,1)")
                    assert list(done.token_ids) == plain([5, 6, 7], 50)
                    accepted = done.complete.speculation.accepted_tokens
        async with AsyncClient(address, credentials=credentials, proxy=False) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.models()
        for deployment, kind in (("verifier-toy", VERIFIER), ("drafter-helper", DRAFTER)):
            handle = serve.get_deployment_handle(deployment, APPLICATION)
            lease = aiter(handle.options(stream=True).lease.remote())
            where = (await anext(lease))["address"]
            assert not await greets(where, kind, None)
            assert await greets(where, kind, files_of(authority, "router"))

    use_deployed(checked, use, **LOADERS)
