"""TLS by the package and by Python's ssl in one process, with torch: each has its own copy of the same libraries.

    python tls_beside_torch.py before|after

`before`: the package is imported before torch and ssl; `after`: after them.
"""

import pathlib
import sys
import tempfile

import numpy as np
from openssl_certificates import Certificates


def handshake(certificates: Certificates, cert: pathlib.Path, key: pathlib.Path) -> str:
    """Python's ssl with itself, over memory. The protocol that was agreed on."""
    import ssl

    client_side = ssl.create_default_context(cafile=certificates.ca)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(cert, key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client_side.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server_side.wrap_bio(to_server, to_client, server_side=True),
    ]
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass
    ends[0].write(b"through")
    assert ends[1].read() == b"through"
    return str(ends[0].version())


def update(certificates: Certificates, cert: pathlib.Path, key: pathlib.Path) -> None:
    import deltasync
    import torch

    weights = {"w": torch.arange(4096, dtype=torch.float32)}
    served = deltasync.Tls(cert=cert, key=key)
    with deltasync.WeightManager(weights, name=f"tls-{deltasync.make_epoch():x}", tls=served) as manager:
        manager.offload(weights)
        with deltasync.Receiver(manager.endpoint, tls=deltasync.Tls(ca=certificates.ca)) as receiver:
            receiver.update()
            assert np.array_equal(dict(receiver.arrays())["w"], weights["w"].numpy())


def main() -> None:
    if sys.argv[1] == "before":
        assert not {"ssl", "torch"} & sys.modules.keys()
        import deltasync
        import torch
    else:
        import ssl

        import torch

        assert ssl.create_default_context()
        import deltasync
    assert torch.ones(8).sum().item() == 8
    with tempfile.TemporaryDirectory() as directory:
        certificates = Certificates(directory)
        cert, key = certificates.sign("agent", "DNS:localhost,IP:127.0.0.1")
        for _ in range(2):
            protocol = handshake(certificates, cert, key)
            update(certificates, cert, key)
    print(f"deltasync {deltasync.__version__} imported {sys.argv[1]} torch {torch.__version__}: {protocol} with both")


if __name__ == "__main__":
    main()
