"""Asking a run's metrics server as Prometheus does, and what a dashboard asks of it."""

import http.client
import json
import pathlib
from collections.abc import Iterator

from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

from tests.patience import HANG_S, patient

GRAFANA = pathlib.Path(__file__).parents[1] / "examples" / "grafana"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def ask(port: int, path: str = "/metrics", *, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Return an answer's status, its content type and its text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(HANG_S))
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers.get("Content-Type", ""), text


def samples_of(text: str) -> Samples:
    """Return the samples of a text by name and sorted labels, as prometheus_client's own parser reads them."""
    families = openmetrics if text.endswith("# EOF\n") else parser
    found = [x for family in families.text_string_to_metric_families(text) for x in family.samples]
    samples = {(x.name, tuple(sorted(x.labels.items()))): x.value for x in found}
    assert len(samples) == len(found), "two samples of the same name and labels"
    return samples


def scrape(port: int) -> Samples:
    """Return the samples of one scrape, in the text format."""
    status, kind, text = ask(port)
    assert status == 200 and kind == "text/plain; version=0.0.4; charset=utf-8"
    return samples_of(text)


def sample(samples: Samples, name: str, **labels: str) -> float:
    """Return one sample's value; ``name`` lacks the prefix of megatron_rl."""
    return samples[f"megatron_rl_{name}", tuple(sorted(labels.items()))]


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """Yield (title of the panel, expression) of the dashboard, Grafana's variables replaced."""
    for panel in json.loads((GRAFANA / "megatron_rl.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
