"""A value that cannot work is refused before anything is applied, with a sentence that says what would."""

import json
from typing import Any

import pytest
import yaml

from deploy.generate import values_schema
from pdproxy.settings.reference import schema
from tests.helm.engine import CHART, Engine, Refused, read_values, value_files

BLOCKS = "prefill nodes have --block-size 256, decode nodes 512: such nodes exchange nothing. Set model.blockSize"
EIGHT_RANKS = "decode: {parallel: {data: 8}, gpus: {count: 8}}\n"
NODES = "nodes: {kinds: [node]}\n"
SHARED = "model: {storage: {kind: claim}}\n"
REFUSED = [
    # by the schema
    ("proxy: {replicas: -1}", "at '/proxy/replicas': minimum: got -1, want 0"),
    ("proxy: {replicas: two}", "at '/proxy/replicas': got string, want integer"),
    ("prefil: {replicas: 2}", "additional properties 'prefil' not allowed"),
    ("model: {storage: {kind: nfs}}", "must be one of 'emptyDir', 'hostPath', 'existingClaim', 'claim', 'claimPerPod'"),
    ("model: {storage: {size: 200GB}}", "at '/model/storage/size': value must be 'a size such as 16Gi'"),
    ("model: {gpuMemory: 90}", "at '/model/gpuMemory': maximum: got 90, want 1"),
    ("model: {extraArgs: --x}", "at '/model/extraArgs': got string, want array"),
    ("transfer: {sideChannelPort: 70000}", "at '/transfer/sideChannelPort': maximum: got 70,000, want 65,535"),
    ("prefill: {gpus: {resource: gpu}}", "must be 'an extended resource such as nvidia.com/gpu'"),
    ("prefill: {maxUnavailable: all}", "must be 'a number, or a percentage such as 25%'"),
    ("decode: {extraEnv: [{name: A, value: 1}]}", "at '/decode/extraEnv/0/value': got number, want string"),
    ("image: {proxy: {repository: 'pdproxy:1'}}", "must be 'a name without tag or digest: those go to tag'"),
    ("tickets: {keys: [short]}", "must be 'a key of 16 characters or more, without blanks, # and commas'"),
    ("apiKeys: {keys: ['key-0123 bob many']}", "must be 'a key of 8 characters or more, then perhaps a name"),
    ("keda: {prometheus: prometheus}", "must be 'an address such as http://prometheus:9090'"),
    ("proxy: {settings: {policy: {retrys: 1}}}", "at '/proxy/settings/policy': additional properties 'retrys' not"),
    ("proxy: {settings: {log: {level: loud}}}", "must be one of 'debug', 'info', 'warning', 'error'"),
    ("model: {blockSize: 100}", "at '/model/blockSize': multipleOf: got 100, want 16"),
    ("proxy: {settings: {policy: {retries: 11}}}", "at '/proxy/settings/policy/retries': maximum: got 11, want 10"),
    ("proxy: {settings: {deadlines: {stall: 5MiB}}}", "at '/proxy/settings/deadlines/stall': '5MiB' does not match"),
    (
        "proxy: {settings: {limits: {queue: []}}}",
        "at '/proxy/settings/limits/queue': got array, want integer or string",
    ),
    ("nameOverride: My_Name", "at '/nameOverride': value must be 'small letters, digits and - within'"),
    ("nameOverride: -x", "at '/nameOverride': value must be 'small letters, digits and - within'"),
    ("nameOverride: 7", "at '/nameOverride': got number, want string"),
    (
        "fullnameOverride: 7up",
        "at '/fullnameOverride': value must be 'small letters, digits and - within, a letter first'",
    ),
    ("fullnameOverride: 'true'", "at '/fullnameOverride': 'not' failed"),
    ("extraObjects: [{kind: ConfigMap}]", "at '/extraObjects/0': missing properties"),
    ("model: {revision: 'a b'}", "at '/model/revision': value must be 'a commit, branch or tag, without blanks'"),
    # by what does not go together
    ("nodes: {kinds: [both]}", "must be one of 'prefill', 'decode', 'node'"),
    ("nodes: {kinds: [node, node]}", "at '/nodes/kinds': items at 0 and 1 are equal"),
    ("nodes: {replicas: 2}", "value must be 'prefill.replicas, decode.replicas or node.replicas'"),
    ("nodes: {kinds: []}", "nodes.kinds lacks a role: name prefill and decode, or node, whose nodes do both."),
    ("nodes: {kinds: [decode]}", "nodes.kinds lacks a role"),
    (
        NODES + "node: {parallel: {tensor: 8}}",
        "node.parallel wants 8 GPUs (tensor 8 x data 1), but nodes that do both have 1",
    ),
    (NODES + "node: {autoscaling: {minReplicas: 9}}", "node.autoscaling.minReplicas is above maxReplicas"),
    (NODES + "node: {extraArgs: [--block-size=264]}", "does not divide the block size (264)"),
    (
        "nodes: {kinds: [decode, node]}\nmodel: {blockSize: 256}\ndecode: {extraArgs: [--block-size=512]}",
        "decode nodes have --block-size 512, nodes that do both 256",
    ),
    (
        "nodes: {kinds: [decode, node]}\ndecode: {autoscaling: {kind: hpa}}",
        "decode.autoscaling.kind is hpa, and nodes.kinds names node beside others",
    ),
    ("model: {download: {enabled: true}}", "model.storage.kind is claimPerPod: use claim or existingClaim"),
    (
        "model: {name: /models/x, storage: {kind: claim}, download: {enabled: true}}",
        "model.name is the path /models/x, which nobody can fetch",
    ),
    ("nodes: {tls: {enabled: true}}", "name the secret with tls.crt, tls.key and ca.crt in nodes.tls.secret"),
    ("nodes: {compileCache: {kind: hostPath}}", "say which one in nodes.compileCache.hostPath"),
    (
        "nodes: {compileCache: {mountPath: /models}}",
        "nodes.compileCache.mountPath and model.storage.mountPath are the same",
    ),
    (
        SHARED + "decode: {hosts: 2, parallel: {tensor: 2}}\nnodes: {compileCache: {kind: claimPerPod}}",
        "nodes.compileCache.kind claimPerPod does not go with decode.hosts above 1",
    ),
    (
        "prefill: {resources: {claims: [{name: gpus}]}}",
        "prefill.resources.claims names gpus, and prefill.resourceClaims does",
    ),
    ("prefill: {extraArgs: [--block-size=256]}\ndecode: {extraArgs: [--block-size, '512']}", BLOCKS),
    ("model: {blockSize: 256}\ndecode: {extraArgs: [--block_size=512]}", BLOCKS),
    ("model: {blockSize: 528, prefixMatchUnit: 32}", "model.prefixMatchUnit (32) does not divide the block size (528)"),
    ("decode: {extraEnv: [{name: A, value: x}, {name: A, value: y}]}", "decode.extraEnv names A twice: keep one."),
    ("proxy: {extraEnv: [{name: A, value: x}, {name: A, value: x}]}", "proxy.extraEnv names A twice: keep one."),
    (
        "prefill: {parallel: {tensor: 8}}",
        "prefill.parallel wants 8 GPUs (tensor 8 x data 1), but prefill nodes have 1 each",
    ),
    (
        "prefill: {parallel: {tensor: 2, data: 2}, gpus: {count: 2}}",
        "wants 4 GPUs (tensor 2 x data 2), but prefill nodes have 2",
    ),
    ("decode: {tensorParallel: 8}", "at '/decode/tensorParallel': value must be 'parallel.tensor, where this went'"),
    ("decode: {parallel: {pipeline: 2}}", "decode.parallel.pipeline: a node cannot be pipeline parallel: vLLM's pull"),
    ("prefill: {extraArgs: [-pp, '4']}", "the argument -pp 4: a node cannot be pipeline parallel"),
    ("model: {extraArgs: [--pipeline_parallel_size=16]}", "--pipeline_parallel_size=16: a node cannot be pipeline"),
    ("prefill: {extraArgs: [--data-parallel-size=2]}", "a parallel size: say prefill.parallel.data"),
    ("decode: {extraArgs: [--revision, v2]}", "decode.extraArgs name a revision: say model.revision, for nodes of two"),
    ("model: {extraArgs: [-tp, '2']}", "extraArgs of prefill nodes say a parallel size: say prefill.parallel.tensor"),
    (
        "decode: {hosts: 2, parallel: {tensor: 2, data: 3}, gpus: {count: 3}}",
        "decode.parallel.data is 3 over 2 hosts: each host takes as many data-parallel ranks as the next",
    ),
    ("decode: {autoscaling: {minReplicas: 9}}", "decode.autoscaling.minReplicas is above maxReplicas"),
    ("decode: {autoscaling: {kind: keda}}", "set keda.prometheus to the address"),
    ("decode: {autoscaling: {promptTokensPerReplica: 9}}", "decode.autoscaling.promptTokensPerReplica cannot be set"),
    ("prefill: {autoscaling: {streamsPerReplica: 9}}", "what decode nodes are scaled by: use promptTokensPerReplica"),
    (
        "prefill: {autoscaling: {promptTokensPerReplica: 0}}",
        "at '/prefill/autoscaling/promptTokensPerReplica': minimum",
    ),
    (
        "decode: {hosts: 2, parallel: {tensor: 2}}\nmodel: {storage: {kind: claimPerPod}}",
        "does not go with decode.hosts",
    ),
    ("proxy: {autoscaling: {minReplicas: 20}}", "proxy.autoscaling.minReplicas is above maxReplicas"),
    ("transfer: {ucxPorts: {first: 9, last: 8}}", "transfer.ucxPorts.first must be below last"),
    (
        "transfer: {sideChannelPort: 20000}",
        "ucxPorts (20000 to 20999) and transfer.sideChannelPort (20000 to 20000) meet",
    ),
    (
        "nodes: {httpPort: 20999}",
        "transfer.ucxPorts (20000 to 20999) and nodes.httpPort (20999 to 20999) meet: move one",
    ),
    ("kvEvents: {replayPort: 5557}", "kvEvents.port (5557 to 5557) and kvEvents.replayPort (5557 to 5557) meet"),
    (
        EIGHT_RANKS + "kvEvents: {replayPort: 5564}",
        "kvEvents.port (5557 to 5564) and kvEvents.replayPort (5564 to 5571)",
    ),
    (
        EIGHT_RANKS + "nodes: {httpPort: 5607}",
        "httpPort (5607 to 5607) and transfer.sideChannelPort (5600 to 5607) meet",
    ),
    (EIGHT_RANKS + "transfer: {sideChannelPort: 65529}", "8 data-parallel ranks take the ports 65529 to 65536"),
    ("transfer: {sideChannelPort: 8000}", "nodes.httpPort (8000 to 8000) and transfer.sideChannelPort (8000 to 8000)"),
    ("model: {storage: {kind: existingClaim}}", "say which one in model.storage.existingClaim"),
    ("apiKeys: {keys: [key-0123], existingSecret: mine}", "apiKeys.keys and apiKeys.existingSecret are both set"),
    ("metrics: {podMonitor: {enabled: true}}", "name Prometheus in networkPolicy.scrapers"),
    ("proxy: {settings: {otel: {export: otlp}}}", "let it through in networkPolicy.proxyEgress"),
    ("ingress: {enabled: true}", "set ingress.host"),
    ("httpRoute: {enabled: true}", "name the Gateway in httpRoute.parentRefs"),
    ("proxy: {settings: {nodes: []}}", "proxy.settings.nodes cannot be set: nodes come from prefill, decode and node"),
    ("discovery: {kind: consul}", "at '/discovery/kind': value must be one of 'kubernetes', 'dns', 'static'"),
    ("proxy: {settings: {discovery: {}}}", "proxy.settings.discovery cannot be set: use discovery.kind"),
    ("proxy: {settings: {keys: {file: x}}}", "proxy.settings.keys cannot be set: use apiKeys"),
    ("proxy: {settings: {deadlines: {drain: 9}}}", "deadlines.drain cannot be set: use proxy.drainSeconds"),
    ("proxy: {settings: {deadlines: {shutdown: 9}}}", "deadlines.shutdown cannot be set: use proxy.shutdownSeconds"),
]


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=[values for values, _ in REFUSED])
def test_is_refused_with_a_sentence(helm: Engine, values: str, sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(yaml.safe_load(values))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        "proxy: {settings: {policy: {migrations: 0, ticket_life: 1m}}}",
        "proxy: {settings: {limits: {body_bytes: 16MiB}}}",
        "proxy: {maxUnavailable: 25%}",
        "prefill: {replicas: 0}",
        NODES + "prefill: {parallel: {tensor: 8}}",
        NODES + "node: {autoscaling: {kind: hpa, promptTokensPerReplica: 9, streamsPerReplica: 9}}",
        "nodes: {kinds: [decode, node]}",
        "nodes: {sharedMemory: 1.5Gi}",
        "image: {proxy: {repository: 'registry.example:5000/a/pdproxy'}}",
        "apiKeys: {keys: [key-01234567 bob 8]}",
        SHARED + "decode: {gpus: {count: 4}, hosts: 2, parallel: {tensor: 8}}",
        SHARED + "decode: {gpus: {count: 8}, hosts: 2, parallel: {tensor: 8, data: 2, pipeline: 1}}",
        EIGHT_RANKS + "kvEvents: {replayPort: 5565}",
        EIGHT_RANKS + "transfer: {sideChannelPort: 65528}",
        "prefill: {extraArgs: [--pipeline-parallel-size=1]}",
        "global: {anything: 1}",
        "proxy: {settings: {otel: {export: otlp}}}\nnetworkPolicy: {enabled: false}",
        "proxy: {settings: {otel: {export: otlp}}}\nnetworkPolicy: {proxyEgress: [{ports: [{port: 4318}]}]}",
        "model: {blockSize: 256}\ndecode: {extraArgs: [--block-size=256]}",
        "prefill: {extraArgs: [--block-size=256]}\ndecode: {extraArgs: [--block-size=128, --block-size=256]}",
    ],
)
def test_is_taken(helm: Engine, values: str) -> None:
    assert helm.render(yaml.safe_load(values))


def named(values: Any, schema: dict[str, Any], schemas: dict[str, Any], path: str = "") -> list[str]:
    """The values that the schema does not describe."""
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if not isinstance(values, dict) or "properties" not in schema:
        return []
    missing = [f"{path}/{name}" for name in values.keys() - schema["properties"].keys()]
    known = values.keys() & schema["properties"].keys()
    return missing + [
        each for name in known for each in named(values[name], schema["properties"][name], schemas, f"{path}/{name}")
    ]


@pytest.mark.parametrize("values", value_files())
def test_the_schema_describes_every_value(values: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    path = value_files()[values] or CHART / "values.yaml"
    assert named(read_values(path), schema, schema["$defs"]) == []


def test_the_settings_are_checked_as_the_proxy_checks_them() -> None:
    text = (CHART / "values.schema.json").read_text()
    assert json.loads(text)["properties"]["proxy"]["properties"]["settings"] == schema(), "run: make generate"
    assert values_schema(text) == text
