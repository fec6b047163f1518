"""A trainer and receivers over TLS, with certificates that the openssl command made as security.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltasync
import numpy as np
import pytest
from deltasync import errors
from openssl_certificates import Certificates

WEIGHTS = {"w": np.arange(100_000, dtype=np.float32)}


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def of_agent(certificates: Certificates, **more: Any) -> dict[str, Any]:
    cert, key = certificates.sign("agent", "IP:127.0.0.1")
    return {"cert": cert, "key": key, **more}


def of_receiver(certificates: Certificates, name: str) -> deltasync.Tls:
    cert, key = certificates.sign(name)
    return deltasync.Tls(cert, key, certificates.ca)


def update(manager: deltasync.WeightManager, tls: Any) -> None:
    with deltasync.Receiver(manager.endpoint, tls=tls, timeout=30) as receiver:
        receiver.update()
        assert np.array_equal(dict(receiver.arrays())["w"], WEIGHTS["w"])


def test_certificates_stand_for_a_token(certificates: Certificates, segment_name: str) -> None:
    tls = of_agent(certificates, ca=certificates.ca, allow=["rollout"])
    with deltasync.WeightManager(WEIGHTS, name=segment_name, tls=tls) as manager:
        manager.offload(WEIGHTS, version=1)
        update(manager, of_receiver(certificates, "rollout"))
        with pytest.raises(errors.Unauthenticated, match="--tls-cert"):
            update(manager, deltasync.Tls(ca=certificates.ca))
        with pytest.raises(errors.Unauthenticated, match="--tls-allow"):
            update(manager, of_receiver(certificates, "other"))
        with pytest.raises(errors.Unsupported, match="TLS only"):
            update(manager, None)


def test_options_may_be_a_mapping_and_one_name_may_stand_alone(certificates: Certificates, segment_name: str) -> None:
    tls = of_agent(certificates, ca=str(certificates.ca), allow="rollout")
    with deltasync.WeightManager(WEIGHTS, name=segment_name, tls=tls) as manager:
        manager.offload(WEIGHTS, version=1)
        update(manager, of_receiver(certificates, "rollout").as_mapping())


def test_what_is_wrong_with_a_certificate_is_said_and_nothing_of_tokens(
    certificates: Certificates, tmp_path: Path, segment_name: str
) -> None:
    other = Certificates(tmp_path, "other")
    with deltasync.WeightManager(WEIGHTS, name=segment_name, tls=of_agent(certificates)) as manager:
        manager.offload(WEIGHTS, version=1)
        for tls, says in (
            ({"ca": other.ca}, "is not signed by a CA in .*other.pem"),
            ({"ca": certificates.ca, "name": "other.example"}, "is for 127.0.0.1, not for other.example"),
        ):
            with pytest.raises(errors.Unauthenticated, match=says) as caught:
                update(manager, tls)
            assert "token" not in str(caught.value)
        update(manager, {"ca": certificates.ca})


def test_a_token_that_is_missing_is_still_said(segment_name: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of many bytes")
    token.chmod(0o600)
    with deltasync.WeightManager(WEIGHTS, name=segment_name, token_file=token) as manager:
        for given in ("", "another secret of many bytes"):
            with pytest.raises(errors.Unauthenticated, match="token"):
                deltasync.Receiver(manager.endpoint, token=given, timeout=30)
