"""docs/operating/kubernetes: valid by Kubernetes' schemas, and of one mind about what no schema sees."""

import functools
import itertools
import re
import unittest

import kubernetes_validate
from operating_support import KUBERNETES, PAGES, documents

VERSIONS = ("1.29", kubernetes_validate.latest_version())  # the first with sidecars, and the newest known
FILES = sorted(KUBERNETES.glob("*.yaml"))
GI = 1 << 30
UNITS = {"Mi": 1 << 20, "Gi": GI}


def size(text):
    return int(text[:-2]) * UNITS[text[-2:]]


def pods():
    """(file and name, labels, pod spec) of each."""
    for path in FILES:
        for document in documents(path):
            template = document["spec"].get("template")
            if template:
                yield f"{path.name} {document['metadata']['name']}", template["metadata"]["labels"], template["spec"]


def containers(spec):
    return [*spec.get("initContainers", ()), *spec["containers"]]


def ours(spec):
    return [container for container in containers(spec) if "/deltasync:" in container["image"]]


def arguments(container):
    """Of --NAME=VALUE and --NAME."""
    return dict((argument.split("=", 1) + [None])[:2] for argument in container["args"] if argument.startswith("--"))


def port_number(container, port):
    return {named["name"]: named["containerPort"] for named in container["ports"]}.get(port, port)


def mounts(container):
    return {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}


class SchemaTest(unittest.TestCase):
    def test_all_files_are_valid(self):
        self.assertTrue(FILES)
        for path, version in itertools.product(FILES, VERSIONS):
            for document in documents(path):
                with self.subTest(path.name, kind=document["kind"], version=version):
                    kubernetes_validate.validate(document, version, strict=True)


def of_each_pod(check):
    """Makes a test of a check of one pod."""
    @functools.wraps(check)
    def test(self):
        for name, _, spec in pods():
            with self.subTest(name):
                check(self, spec)

    return test


class PodTest(unittest.TestCase):
    """Each test is a fault that a schema lets through."""

    @of_each_pod
    def test_an_agent_sees_the_processes_that_it_serves_and_is_of_their_user(self, spec):
        sockets = [container["name"] for container in containers(spec) if "/run/deltasync" in mounts(container)]
        if not sockets:
            return
        self.assertGreater(len(sockets), 1, "somebody has to use the agent's socket")
        self.assertTrue(spec["shareProcessNamespace"])
        for container in containers(spec):
            self.assertIn("/dev/shm", mounts(container), container["name"])
            self.assertNotIn("runAsUser", container["securityContext"], "all are of one user")

    @of_each_pod
    def test_the_shared_memory_has_a_size_and_fits_into_the_agents_memory(self, spec):
        for container in ours(spec):
            if "command" in container:
                continue
            volumes = {volume["name"]: volume for volume in spec["volumes"]}
            shm = volumes[mounts(container)["/dev/shm"]["name"]]["emptyDir"]
            self.assertEqual(shm["medium"], "Memory")
            self.assertLess(size(shm["sizeLimit"]), size(container["resources"]["limits"]["memory"]))

    @of_each_pod
    def test_sidecars_are_there_first(self, spec):
        for container in spec.get("initContainers", ()):
            self.assertEqual(container["restartPolicy"], "Always")
            self.assertIn("startupProbe", container)

    @of_each_pod
    def test_nothing_runs_as_root_or_with_capabilities(self, spec):
        self.assertTrue(spec["securityContext"]["runAsNonRoot"])
        self.assertFalse(spec["automountServiceAccountToken"])
        for container in containers(spec):
            self.assertFalse(container["securityContext"]["allowPrivilegeEscalation"])
            self.assertEqual(container["securityContext"]["capabilities"], {"drop": ["ALL"]})
        for container in ours(spec):
            self.assertTrue(container["securityContext"]["readOnlyRootFilesystem"])
            self.assertEqual(set(container["resources"]), {"requests", "limits"})

    @of_each_pod
    def test_the_user_is_the_images(self, spec):
        user = re.search(r"^USER (\d+):(\d+)$", (PAGES / "Containerfile").read_text(), re.MULTILINE)
        context = spec["securityContext"]
        self.assertEqual([context["runAsUser"], context["runAsGroup"], context["fsGroup"]],
                         [int(user[1]), int(user[2]), int(user[2])])

    @of_each_pod
    def test_probes_ask_the_port_of_the_pages_by_its_scheme(self, spec):
        for container in ours(spec):
            pages = arguments(container)["--http"].rsplit(":", 1)[1]
            scheme = "HTTPS" if "--tls-cert" in arguments(container) else "HTTP"
            self.assertIn("--http-allow-remote", arguments(container))
            asked = {}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                get = container.get(probe, {}).get("httpGet")
                if get:
                    asked[probe] = get["path"]
                    self.assertEqual(str(port_number(container, get["port"])), pages)
                    self.assertEqual(get.get("scheme", "HTTP"), scheme)
            self.assertEqual(asked["readinessProbe"], "/readyz")
            self.assertIn("livenessProbe", container)

    @of_each_pod
    def test_an_agent_that_serves_damaged_bytes_is_not_killed(self, spec):
        for container in ours(spec):
            if "command" in container:
                continue
            probe = container["livenessProbe"]["tcpSocket"]
            listen = arguments(container)["--listen"].rsplit(":", 1)[1]
            self.assertEqual(str(port_number(container, probe["port"])), listen)

    @of_each_pod
    def test_ports_are_those_that_programs_listen_on(self, spec):
        names = [port["name"] for container in containers(spec) for port in container.get("ports", ())]
        self.assertEqual(len(names), len(set(names)), "a port's name is of one container of a pod")
        for container in ours(spec):
            options = arguments(container)
            listens = {options[name].rsplit(":", 1)[1] for name in ("--listen", "--http") if name in options}
            self.assertEqual({str(port["containerPort"]) for port in container["ports"]}, listens)

    @of_each_pod
    def test_pages_have_ports_that_prometheus_looks_for(self, spec):
        scrape = {job["job_name"]: job for job in documents(PAGES / "prometheus.yaml")[0]["scrape_configs"]}
        wanted = re.compile(scrape["deltasync-pods"]["relabel_configs"][0]["regex"])
        for container in ours(spec):
            pages = arguments(container)["--http"].rsplit(":", 1)[1]
            matched = [port for port in container["ports"] if wanted.fullmatch(port["name"])]
            self.assertEqual([str(port["containerPort"]) for port in matched], [pages])
            self.assertEqual(matched[0]["name"] == "deltasync-https", "--tls-cert" in arguments(container))

    @of_each_pod
    def test_files_that_options_name_are_mounted(self, spec):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in containers(spec):
            for mount in container.get("volumeMounts", ()):
                self.assertIn(mount["name"], volumes)
        for container in ours(spec):
            for option, value in arguments(container).items():
                if not (value or "").startswith("/"):
                    continue
                where = [path for path in mounts(container) if value.startswith(path + "/")]
                self.assertTrue(where, f"{option}={value} is in no volume")
                secret = volumes[mounts(container)[where[0]]["name"]].get("secret")
                if secret:
                    self.assertEqual(secret["defaultMode"], 0o440, "a group reads it, others do not")
                    paths = {item["path"] for item in secret.get("items", ())} or {"token", "tls.crt", "tls.key"}
                    self.assertIn(value[len(where[0]) + 1:], paths)


class NetworkTest(unittest.TestCase):
    """Services and policies, and the pods that they are about."""

    def setUp(self):
        self.documents = [document for path in FILES for document in documents(path)]

    def of(self, kind):
        return [document for document in self.documents if document["kind"] == kind]

    def test_each_pod_has_a_policy_for_the_ports_that_it_listens_on_and_no_other(self):
        policies = {tuple(policy["spec"]["podSelector"]["matchLabels"].items()): policy["spec"]
                    for policy in self.of("NetworkPolicy")}
        for name, labels, spec in pods():
            with self.subTest(name):
                policy = policies[("app", labels["app"]),]
                allowed = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
                listening = {port["containerPort"] for container in containers(spec)
                             for port in container.get("ports", ())}
                self.assertEqual(allowed, listening)
        self.assertEqual(len(policies), len(list(pods())))

    def test_pages_are_for_those_who_scrape(self):
        for policy in self.of("NetworkPolicy"):
            for rule in policy["spec"]["ingress"]:
                if {port["port"] for port in rule["ports"]} & {8080, 8081}:
                    self.assertEqual([list(who) for who in rule["from"]], [["namespaceSelector"]])

    def test_receivers_dial_a_service_that_leads_to_an_agent_which_lets_them_in(self):
        services = {service["metadata"]["name"]: service for service in self.of("Service")}
        all_pods = list(pods())
        dialled = 0
        for name, labels, spec in all_pods:
            for container in ours(spec):
                address = arguments(container).get("--from")
                if not address:
                    continue
                dialled += 1
                with self.subTest(name):
                    host, port = address.rsplit(":", 1)
                    service = services[host]
                    self.assertEqual([str(entry["port"]) for entry in service["spec"]["ports"]], [port])
                    (_, _, behind), = [pod for pod in all_pods if pod[1]["app"] == service["spec"]["selector"]["app"]]
                    agent, = ours(behind)
                    target = service["spec"]["ports"][0]["targetPort"]
                    self.assertEqual(arguments(agent)["--listen"].rsplit(":", 1)[1], str(port_number(agent, target)))
                    self.assertEqual("--tls-cert" in arguments(agent), "--tls-ca" in arguments(container))
                    policy, = [policy for policy in self.of("NetworkPolicy")
                               if policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]]
                    rule, = [rule for rule in policy["spec"]["ingress"] if {"port": int(port)} in rule["ports"]]
                    self.assertLessEqual(rule["from"][0]["podSelector"]["matchLabels"].items(), labels.items())
        self.assertEqual(dialled, 2)


if __name__ == "__main__":
    unittest.main()
