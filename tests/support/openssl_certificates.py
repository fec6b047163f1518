"""A CA, and certificates that it signs, made by the openssl command as security.md says."""

import pathlib
import subprocess

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(directory, *args):
    subprocess.run(["openssl", *args], cwd=directory, check=True, capture_output=True)


class Certificates:
    """In `directory`: NAME.pem and NAME.key of each name. `ca` is another name for another CA."""

    def __init__(self, directory, ca="ca"):
        self.directory = pathlib.Path(directory)
        self._ca = ca
        openssl(self.directory, "req", "-x509", *NEW_KEY, "-days", "60", "-subj", f"/CN=test {ca}", "-keyout", f"{ca}.key",
                "-out", f"{ca}.pem")

    @property
    def ca(self):
        return self.directory / f"{self._ca}.pem"

    def sign(self, name, names="", days=60):
        """`names`: of a server, such as "DNS:agent.example,IP:127.0.0.1". Returns the two files."""
        openssl(self.directory, "req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        extensions = "basicConstraints=CA:FALSE\n" + (f"subjectAltName={names}\n" if names else "")
        (self.directory / f"{name}.ext").write_text(extensions)
        openssl(self.directory, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{self._ca}.pem", "-CAkey", f"{self._ca}.key",
                "-CAcreateserial", "-days", str(days), "-extfile", f"{name}.ext", "-out", f"{name}.pem")
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"

    def server_options(self, name="agent"):
        """--tls-cert and --tls-key of a server at 127.0.0.1."""
        cert, key = self.sign(name, "DNS:localhost,IP:127.0.0.1")
        return "--tls-cert", cert, "--tls-key", key

    def client_options(self, name=None):
        """--tls-ca, and with a name a certificate of one's own."""
        if name is None:
            return "--tls-ca", self.ca
        cert, key = self.sign(name)
        return "--tls-ca", self.ca, "--tls-cert", cert, "--tls-key", key
