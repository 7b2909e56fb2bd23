"""Certificates (ECDSA, so that the whole set takes under a second) and the kubeconfigs that use them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .addresses import (
    APISERVER_URL,
    BRIDGE_IP,
    CLUSTER_DOMAIN,
    KUBERNETES_SERVICE_IP,
    LOOPBACK,
    NODES,
    node_ip,
)
from .console import run
from .files import digest_of, write_if_changed

VALID_DAYS = 3650


@dataclass(frozen=True)
class Identity:
    """One certificate: file name, who it speaks for, and the names and addresses that it serves."""

    name: str
    organization: str
    common_name: str
    serves: tuple[str, ...] = ()


def identities() -> list[Identity]:
    """Every certificate of the cluster besides the authority's own."""
    service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{CLUSTER_DOMAIN}")
    apiserver_serves = (
        f"IP:{BRIDGE_IP}",
        f"IP:{KUBERNETES_SERVICE_IP}",
        f"IP:{LOOPBACK}",
        *(f"DNS:{n}" for n in service),
    )
    return [
        Identity("apiserver", "kubernetes", "kube-apiserver", apiserver_serves),
        Identity("admin", "system:masters", "admin"),
        Identity("controller-manager", "kubernetes", "system:kube-controller-manager"),
        Identity("scheduler", "kubernetes", "system:kube-scheduler"),
        Identity("proxy", "kubernetes", "system:kube-proxy"),
        Identity("coredns", "kubernetes", "system:coredns"),
        Identity("kwok", "system:masters", "kwok"),
        *(Identity(n, "system:nodes", f"system:node:{n}", (f"DNS:{n}", f"IP:{node_ip(n)}")) for n in NODES),
    ]


def kubeconfig(identity: str, pki: Path) -> str:
    """A kubeconfig (JSON is YAML) that holds paths, not copies, of the certificates."""
    cluster = {"server": APISERVER_URL, "certificate-authority": str(pki / "ca.crt")}
    user = {"client-certificate": str(pki / f"{identity}.crt"), "client-key": str(pki / f"{identity}.key")}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "headrace",
            "clusters": [{"name": "headrace", "cluster": cluster}],
            "users": [{"name": identity, "user": user}],
            "contexts": [{"name": "headrace", "context": {"cluster": "headrace", "user": identity}}],
        },
        indent=1,
    )


def make(pki: Path, admin_kubeconfig: Path) -> None:
    """Makes keys, certificates and kubeconfigs that are missing or that are for other names than they should be."""
    pki.mkdir(parents=True, exist_ok=True, mode=0o700)
    _make_key(pki / "service-accounts.key")
    public = pki / "service-accounts.pub"
    if not public.exists():
        run(["openssl", "ec", "-in", pki / "service-accounts.key", "-pubout", "-out", public], "service account key")
    _make_key(pki / "ca.key")
    if not (pki / "ca.crt").exists():
        subject = ["-subj", "/CN=headrace-ca", "-days", str(VALID_DAYS)]
        run(
            ["openssl", "req", "-x509", "-key", pki / "ca.key", "-out", pki / "ca.crt", *subject],
            "certificate authority",
        )
    for identity in identities():
        _make_certificate(pki, identity)
        if identity.name != "apiserver":
            write_if_changed(pki / f"{identity.name}.kubeconfig", kubeconfig(identity.name, pki), mode=0o600)
    write_if_changed(admin_kubeconfig, kubeconfig("admin", pki), mode=0o600)


def _make_key(path: Path) -> None:
    if not path.exists():
        run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path], f"key {path.name}")
        path.chmod(0o600)


def _make_certificate(pki: Path, identity: Identity) -> None:
    certificate = pki / f"{identity.name}.crt"
    subject = f"/O={identity.organization}/CN={identity.common_name}"
    names = ",".join(identity.serves) or f"DNS:{identity.name}"
    digest, digest_file = digest_of([subject, names, (pki / "ca.crt").read_bytes()]), pki / f"{identity.name}.digest"
    if certificate.exists() and digest_file.exists() and digest_file.read_text() == digest:
        return
    key = pki / f"{identity.name}.key"
    _make_key(key)
    request = run(["openssl", "req", "-new", "-key", key, "-subj", subject], f"certificate request of {identity.name}")
    extensions = pki / f"{identity.name}.extensions"
    extensions.write_text(f"subjectAltName={names}\n")
    authority = ["-CA", pki / "ca.crt", "-CAkey", pki / "ca.key", "-CAcreateserial", "-days", str(VALID_DAYS)]
    run(
        ["openssl", "x509", "-req", *authority, "-extfile", extensions, "-out", certificate],
        f"certificate of {identity.name}",
        input_text=request,
    )
    write_if_changed(digest_file, digest)
