"""Tenants by the common names of their certificates."""

import pytest
import trustme

import kvdb
from kvdb import errors
from kvdb.config import ServerConfig, Tls
from kvdb.server.tenancy.tokens_file import new_token

NAMES = ("acme", "globex", "no/tenant")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """`tls` by common name, and the paths of the server's certificate and of the CA."""
    folder = tmp_path_factory.mktemp("certificates")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca")
    pairs = {"server": ca.issue_cert("127.0.0.1"), **{name: ca.issue_cert(common_name=name) for name in NAMES}}
    paths = {}
    for number, (name, pair) in enumerate(pairs.items()):
        paths[name] = str(folder / f"{number}.crt"), str(folder / f"{number}.key")
        pair.cert_chain_pems[0].write_to_path(paths[name][0])
        pair.private_key_pem.write_to_path(paths[name][1])
    return {name: Tls(str(folder / "ca"), *paths[name]) for name in pairs}


@pytest.fixture
def served(serve, certificates):
    own = certificates["server"]
    return lambda **more: (
        serve(tls_cert=own.cert, tls_key=own.key, tls_client_ca=own.ca, tls_tenants=True, local_socket="auto", **more).target
    )


def test_a_certificate_names_its_tenant(served, certificates, spec, make_kv):
    kv, target = make_kv(spec, 40), served()
    with kvdb.connect(target, tls=certificates["acme"]) as acme, kvdb.connect(target, tls=certificates["globex"]) as globex:
        acme.import_context(spec, kv.tokens, kv.pairs(), name="doc")
        assert [context.name for context in acme.contexts()] == ["doc"]
        assert globex.contexts() == []
        assert globex.match(spec, kv.tokens).tokens == 0
        with pytest.raises(errors.PermissionDenied):
            globex.verify_store()


def test_a_name_that_is_no_tenants_comes_no_further(served, certificates):
    with pytest.raises(errors.Unauthenticated, match="no/tenant"):
        kvdb.connect(served(), tls=certificates["no/tenant"])


def test_a_token_that_is_brought_decides(served, certificates, tmp_path, spec, make_kv):
    path = tmp_path / "tokens.json"
    token, kv = new_token(path, "globex"), make_kv(spec, 40)
    target = served(tokens_file=str(path))
    with kvdb.connect(target, tls=certificates["acme"], token=token) as globex:
        globex.import_context(spec, kv.tokens, kv.pairs(), name="doc")
    with kvdb.connect(target, tls=certificates["acme"]) as acme:
        assert acme.contexts() == []
    with pytest.raises(errors.Unauthenticated):
        kvdb.connect(target, tls=certificates["acme"], token="wrong")


def test_names_in_certificates_need_a_ca():
    with pytest.raises(errors.ConfigError, match="tls_tenants needs"):
        ServerConfig(tls_tenants=True)
