"""A trainer and receivers over TLS, with certificates that the openssl command made as docs/security.md says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import deltasync
import numpy as np
import pytest
from deltasync import errors


def openssl(folder: Path, *args: str) -> None:
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)


def signed(folder: Path, name: str, extensions: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}")
    openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (folder / f"{name}.ext").write_text(extensions)
    sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.pem")


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=test CA")
    openssl(tmp_path, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem")
    signed(tmp_path, "agent", "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    signed(tmp_path, "rollout", "basicConstraints=CA:FALSE\n")
    signed(tmp_path, "other", "basicConstraints=CA:FALSE\n")
    return tmp_path


def test_certificates_stand_for_a_token(certificates: Path, segment_name: str) -> None:
    ca = certificates / "ca.pem"
    agent = deltasync.Tls(certificates / "agent.pem", certificates / "agent.key", ca, allow=("rollout",))
    weights = {"w": np.arange(100_000, dtype=np.float32)}
    with deltasync.WeightManager(weights, name=segment_name, tls=agent) as manager:
        manager.offload(weights, version=1)

        def receiver(tls: deltasync.Tls | None) -> deltasync.Receiver:
            return deltasync.Receiver(manager.endpoint, tls=tls, timeout=30)

        named = deltasync.Tls(certificates / "rollout.pem", certificates / "rollout.key", ca)
        with receiver(named) as pulled:
            pulled.update()
            assert np.array_equal(dict(pulled.arrays())["w"], weights["w"])
        with pytest.raises(errors.Unauthenticated, match="--tls-cert"), receiver(deltasync.Tls(ca=ca)) as refused:
            refused.update()
        stranger = deltasync.Tls(certificates / "other.pem", certificates / "other.key", ca)
        with pytest.raises(errors.Unauthenticated, match="--tls-allow"), receiver(stranger) as refused:
            refused.update()
        with pytest.raises(errors.Unsupported, match="TLS only"), receiver(None) as refused:
            refused.update()
