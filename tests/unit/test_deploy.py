"""The files in deploy/ parse, and every flag, metric, port and alert in them exists."""

import configparser
import json
import re
import shlex
import tomllib

import kubernetes_validate
import pytest
import yaml

from grpc_service.app.metrics import METRICS, PREFIX
from grpc_service.cli.main import build_parser
from tests.support.programs import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = "1.29"  # the version whose schemas check the manifests
SUFFIXES = ("_bucket", "_sum", "_count")


MANIFESTS = ("kubernetes.yaml", "kubernetes-gateway.yaml")


def documents(name="kubernetes.yaml"):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.fixture
def pod():
    [deployment] = [one for one in documents() if one["kind"] == "Deployment"]
    return deployment["spec"]["template"]["spec"]


@pytest.fixture
def container(pod):
    [one] = pod["containers"]
    return one


def seconds_of(args, name, default):
    """Return a flag's value in seconds."""
    found = [arg.partition("=")[2] for arg in args if arg.startswith(f"--{name}=")]
    return float(found[0]) if found else default


# ---- Kubernetes ------------------------------------------------------------------------------


def test_the_command_lines_are_ones_that_the_program_takes(container):
    build_parser().parse_args(container["args"])
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[0] == "triolet"
    assert hook[1] == "drain"
    build_parser().parse_args(hook[1:])


def test_the_service_and_the_probes_find_the_ports(container):
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    args = build_parser().parse_args(container["args"])
    assert ports == {"grpc": 50051, "metrics": args.metrics_port}
    [service] = [one for one in documents() if one["kind"] == "Service"]
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == ports["grpc"]


def test_nothing_kills_the_pod_while_it_drains(pod, container):
    hook = seconds_of(container["lifecycle"]["preStop"]["exec"]["command"], "cut-after", 30.0)
    drain = seconds_of(container["args"], "drain-timeout", 30.0)
    assert pod["terminationGracePeriodSeconds"] > hook + drain


def test_it_runs_without_rights_and_within_limits(pod, container):
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] != 0
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_selectors_select_the_pods():
    labels = {"app": "triolet"}
    for one in documents():
        spec = one["spec"]
        match one["kind"]:
            case "Service":
                assert spec["selector"] == labels
            case "PodDisruptionBudget":
                assert spec["selector"]["matchLabels"] == labels
            case "Deployment":
                assert spec["selector"]["matchLabels"] == labels
                assert spec["template"]["metadata"]["labels"] == labels


# ---- Kubernetes with a gateway


@pytest.fixture
def fleet():
    """Return the containers of the gateway and of a server, by their Deployments' names."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]["containers"][0]
        for one in documents("kubernetes-gateway.yaml")
        if one["kind"] == "Deployment"
    }


def test_the_gateway_finds_the_servers_at_the_port_that_only_it_may_reach(fleet):
    server, gateway = fleet["triolet-worker"], fleet["gateway"]
    args = build_parser().parse_args(server["args"])
    [(name, port)] = args.vllm_engine_port
    assert (name, args.insecure) == ("", True)
    ports = {one["name"]: one["containerPort"] for one in server["ports"]}
    assert ports == {"grpc": 50051, "gateway": port}
    assert f"--service-discovery-port={port}" in gateway["args"]
    assert "--selector=app=triolet-worker" in gateway["args"]
    [policy] = [
        one for one in documents("kubernetes-gateway.yaml") if one["kind"] == "NetworkPolicy"
    ]
    assert policy["spec"]["podSelector"]["matchLabels"] == {"app": "triolet-worker"}
    [rule] = policy["spec"]["ingress"]
    assert [one["port"] for one in rule["ports"]] == [port]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "gateway"}}}]


def test_nothing_kills_a_server_behind_the_gateway_while_it_drains(fleet):
    drain = seconds_of(fleet["triolet-worker"]["args"], "drain-timeout", 30.0)
    [spec] = [
        one["spec"]["template"]["spec"]
        for one in documents("kubernetes-gateway.yaml")
        if one["metadata"]["name"] == "triolet-worker" and one["kind"] == "Deployment"
    ]
    assert spec["terminationGracePeriodSeconds"] > drain + 60
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in fleet["triolet-worker"]["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_caches_of_servers_outlive_their_pods(name):
    found = documents(name)
    claims = [one["metadata"]["name"] for one in found if one["kind"] == "PersistentVolumeClaim"]
    for one in found:
        pod = one["spec"]["template"]["spec"] if one["kind"] == "Deployment" else {"containers": ()}
        for container in pod["containers"]:
            if container["args"][0] != "serve":
                continue
            [home] = [
                m["name"] for m in container["volumeMounts"] if m["mountPath"].startswith("/home")
            ]
            [volume] = [one for one in pod["volumes"] if one["name"] == home]
            assert volume["persistentVolumeClaim"]["claimName"] in claims
            # Otherwise Kubernetes would make the kernels' folder group-writable at each mount.
            assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert claims


def test_no_command_of_a_gateway_has_flags_that_exclude_each_other():
    """smg ignores --worker-urls with --enable-igw, and then has no servers."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *DEPLOY.iterdir()]
    launches = [
        one for page in pages for one in re.findall(r"smg launch(?:.*\\\n)*.*", page.read_text())
    ]
    assert len(launches) >= 2
    assert [one for one in launches if "--enable-igw" in one and "--worker-urls" in one] == []


def test_each_extra_that_a_page_or_a_message_names_is_one_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "engine").rglob("*.py")]
    texts += (ROOT / "grpc_service").rglob("*.py")
    form = re.compile(r"(?:\.\[|install_command\(['\"])([a-z]+)(?:\]['\"`]|['\"]\))")
    named = {extra for text in texts for extra in form.findall(text.read_text())}
    assert {"smg", "ray", "images", "tracing", "sentencepiece", "openai"} <= named
    assert named <= set(project["optional-dependencies"])
    pages = [path for path in texts if path.suffix == ".md"]
    unpublished = [path.name for path in pages if "triolet[" in path.read_text()]
    assert unpublished == [], "no index has the package: a page installs it from the repository"


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_manifest_is_one_that_kubernetes_takes(name):
    for document in documents(name):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replica"), 2),
        (("spec", "replicas"), "two"),
        (("spec", "template", "spec", "containers", 0, "readinessProbe", "grpc", "port"), "x"),
    ],
)
def test_a_misspelled_or_wrong_field_would_be_found(path, value):
    [deployment] = [one for one in documents() if one["kind"] == "Deployment"]
    *parents, last = path
    place = deployment
    for part in parents:
        place = place[part]
    place[last] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


# ---- the image and the unit ------------------------------------------------------------------


def instructions():
    """Return the image's instructions."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [tuple(line.split(None, 1)) for line in lines if line and not line.startswith("#")]


def test_the_image_copies_existing_files_and_does_not_run_as_root():
    sources = [
        source
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for source in shlex.split(rest)[:-1]
    ]
    needed = {"engine", "grpc_service", "proto", "pyproject.toml", "constraints.txt"}
    assert needed <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users
    assert not {"root", "0"} & set(users[-1].split(":"))
    entry, command = (
        json.loads(rest) for name, rest in instructions() if name in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["triolet"]
    build_parser().parse_args(command)


def test_the_image_has_the_compiler_of_the_kernels_where_it_runs():
    """The kernels are compiled at the server's start, for the processor that it runs on."""
    names = [name for name, _ in instructions()]
    last_stage = instructions()[len(names) - names[::-1].index("FROM") :]
    assert ("ARG", "PACKAGES=g++") in last_stage
    assert any(
        name == "RUN" and "apt-get install" in rest and "${PACKAGES}" in rest
        for name, rest in last_stage
    )
    assert '"g++"' in (ROOT / "engine/worker/forward/variants.py").read_text()


def test_the_image_takes_torchs_build_as_an_argument():
    assert ("ARG", "TORCH_INDEX=https://download.pytorch.org/whl/cpu") in instructions()


def test_the_unit_drains_reloads_and_runs_without_rights():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string((DEPLOY / "triolet.service").read_text())
    service = unit["Service"]
    program, *args = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/triolet")
    build_parser().parse_args(args)
    assert service["KillSignal"] == "SIGTERM"
    assert service["ExecReload"].endswith("-HUP $MAINPID")
    assert service["SuccessExitStatus"] == "75"
    assert int(service["TimeoutStopSec"]) > 30 + 60  # defaults of --drain-timeout, --step-timeout
    assert service["DynamicUser"] == service["NoNewPrivileges"] == "yes"
    kept = dict(one.split("=") for one in shlex.split(service["Environment"]))["XDG_CACHE_HOME"]
    assert kept == f"/var/cache/{service['CacheDirectory']}"


# ---- the dashboard and the alerts ------------------------------------------------------------


def names_in(expression):
    """Return the metrics that an expression names, without prefix and suffix."""
    found = re.findall(rf"{PREFIX}(\w+)", expression)
    return {
        next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name) for name in found
    }


KNOWN = {metric.name for metric in METRICS}
HISTOGRAMS = {metric.name for metric in METRICS if metric.kind == "histogram"}


def check(expression):
    """Check that every metric and label of an expression exists."""
    assert names_in(expression) <= KNOWN, expression
    for name in re.findall(rf"{PREFIX}(\w+)_bucket", expression):
        assert name in HISTOGRAMS, expression
    assert expression.count("(") == expression.count(")")
    for label in re.findall(r"[{,](\w+)=~?\"", expression):
        assert label in {"instance", "end", "code"}, expression


def test_the_dashboard_shows_existing_metrics_in_panels_that_do_not_overlap():
    board = json.loads((DEPLOY / "grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    for expression in expressions:
        check(expression)
    shown = set().union(*map(names_in, expressions))
    new = {"cancel_to_free_seconds", "deadline_missed_total", "parked_seconds", "unread_calls"}
    new |= {"step_gap_seconds", "plan_discarded_total", "drain_remaining_requests"}
    new |= {"replicas_degraded", "worker_deaths_total"}
    assert new <= shown
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [
        (at["x"] + x, at["y"] + y)
        for at in (panel["gridPos"] for panel in board["panels"])
        for x in range(at["w"])
        for y in range(at["h"])
    ]
    assert len(set(places)) == len(places)


def test_each_alert_uses_existing_metrics_and_is_explained():
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        check(rule["expr"])
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
    page = (ROOT / "docs" / "operations.md").read_text()
    explained = re.findall(r"^\| `(Triolet\w+)` \| .+ \| .+ \|$", page, re.MULTILINE)
    assert explained == [rule["alert"] for rule in rules]


def test_the_check_finds_an_unknown_metric():
    with pytest.raises(AssertionError):
        check('rate(triolet:request_total{end="failed"}[5m])')
