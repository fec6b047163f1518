"""The installed package, used as its users do: one version goes from a trainer's process to a receiver's.

    python one_version.py

Needs nothing but the package and numpy. Fails if a byte differs, or if the package is not whole.
"""

import hashlib
import importlib.metadata
import importlib.resources
import subprocess
import sys
import sysconfig

import numpy as np


def weights() -> dict[str, np.ndarray]:
    bits = np.random.default_rng(22).integers(0, 2**32, size=(1024, 768), dtype=np.uint32)
    return {"embed.weight": bits, "norm.weight": np.linspace(-1, 1, 768, dtype=np.float32)}


def digests(arrays) -> str:
    """A line a tensor, in the order of the names."""
    return "\n".join(
        f"{name} {array.dtype} {array.shape} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
        for name, array in sorted(dict(arrays).items())
    )


def train() -> None:
    """Serves one version until its standard input ends."""
    import deltasync

    with deltasync.WeightManager(weights(), name=f"wheel-{deltasync.make_epoch():x}") as manager:
        manager.offload(weights(), version=1)
        print(manager.endpoint, flush=True)
        sys.stdin.read()


def receive(endpoint: str) -> None:
    import deltasync

    with deltasync.Receiver(endpoint) as receiver:
        report = receiver.update(1)
        print(digests(receiver.arrays()))
        print(f"version {report.version} received by Python {sys.version.split()[0]}", file=sys.stderr)
    assert "torch" not in sys.modules


def check_package() -> None:
    distribution = importlib.metadata.distribution("deltasync")
    for program in ("deltasync", "deltasync-agent"):
        command = [f"{sysconfig.get_path('scripts')}/{program}", "--version"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        assert said == distribution.version, (program, said)
    package = importlib.resources.files("deltasync")
    assert all(package.joinpath(name).is_file() for name in ("py.typed", "_native.pyi"))
    plugins = {entry.group for entry in distribution.entry_points}
    assert plugins >= {"vllm.general_plugins", "sglang.srt.plugins"}, plugins


def main() -> None:
    check_package()
    this = [sys.executable, __file__]
    with subprocess.Popen([*this, "train"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        endpoint = trainer.stdout.readline().strip()
        assert endpoint, "the trainer ended before it served anything"
        received = subprocess.run([*this, "receive", endpoint], check=True, stdout=subprocess.PIPE, text=True).stdout
        trainer.stdin.close()
        assert trainer.wait(60) == 0
    assert received.strip() == digests(weights()), received
    print("one version went through, bit for bit")


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            main()
        case ["train"]:
            train()
        case ["receive", endpoint]:
            receive(endpoint)
        case _:
            sys.exit(__doc__)
