{{/* What a schema cannot say: values that do not go together. */}}
{{- define "pdproxy.checks" -}}
{{- $v := .Values -}}
{{- range $role := list "prefill" "decode" -}}
  {{- $r := get $v $role -}}
  {{- $all := mul (int $r.gpus.count) (int $r.hosts) -}}
  {{- if and (gt (int $r.gpus.count) 0) (ne (int $all) (int $r.tensorParallel)) -}}
    {{- fail (printf "%s.tensorParallel is %d, but a %s node has %d GPUs (gpus.count %d on each of %d hosts): make them equal. For more engines use replicas." $role (int $r.tensorParallel) $role (int $all) (int $r.gpus.count) (int $r.hosts)) -}}
  {{- end -}}
  {{- if gt (int $r.autoscaling.minReplicas) (int $r.autoscaling.maxReplicas) -}}
    {{- fail (printf "%s.autoscaling.minReplicas is above maxReplicas." $role) -}}
  {{- end -}}
  {{- $known := dict "prefill" "promptTokensPerReplica" "decode" "streamsPerReplica" -}}
  {{- range $other, $key := omit $known $role -}}
    {{- if hasKey $r.autoscaling $key -}}
      {{- fail (printf "%s.autoscaling.%s cannot be set, that is what %s nodes are scaled by: use %s." $role $key $other (get $known $role)) -}}
    {{- end -}}
  {{- end -}}
  {{- if and (eq $r.autoscaling.kind "keda") (not $v.keda.prometheus) -}}
    {{- fail (printf "%s.autoscaling.kind is keda: set keda.prometheus to the address of the Prometheus that scrapes the proxy." $role) -}}
  {{- end -}}
  {{- if and (gt (int $r.hosts) 1) (eq $v.model.storage.kind "claimPerPod") -}}
    {{- fail (printf "model.storage.kind claimPerPod does not go with %s.hosts above 1: use claim, existingClaim or hostPath." $role) -}}
  {{- end -}}
{{- end -}}
{{- $sizes := dict -}}
{{- range $role := list "prefill" "decode" -}}
  {{- $_ := set $sizes $role (include "pdproxy.blockSize" (dict "root" $ "component" $role)) -}}
{{- end -}}
{{- if and (ne $sizes.prefill $sizes.decode) (ne $sizes.prefill "0") (ne $sizes.decode "0") -}}
  {{- fail (printf "prefill nodes have --block-size %s, decode nodes %s: such nodes exchange nothing. Set model.blockSize for both, and leave it out of extraArgs." $sizes.prefill $sizes.decode) -}}
{{- end -}}
{{- $unit := int $v.model.prefixMatchUnit -}}
{{- if and (gt $unit 0) (ne 0 (mod (int $sizes.prefill) $unit)) -}}
  {{- fail (printf "model.prefixMatchUnit (%d) does not divide the block size (%s): vLLM would refuse to start. 16 divides any." $unit $sizes.prefill) -}}
{{- end -}}
{{- range $part := list "prefill" "decode" "proxy" -}}
  {{- $names := list -}}
  {{- range (get $v $part).extraEnv -}}
    {{- if has .name $names -}}{{- fail (printf "%s.extraEnv names %s twice: keep one." $part .name) -}}{{- end -}}
    {{- $names = append $names .name -}}
  {{- end -}}
{{- end -}}
{{- if gt (int $v.proxy.autoscaling.minReplicas) (int $v.proxy.autoscaling.maxReplicas) -}}
  {{- fail "proxy.autoscaling.minReplicas is above maxReplicas." -}}
{{- end -}}
{{- $ucx := $v.transfer.ucxPorts -}}
{{- if ge (int $ucx.first) (int $ucx.last) -}}
  {{- fail "transfer.ucxPorts.first must be below last: each worker of a node takes ports of its own." -}}
{{- end -}}
{{- range $name, $port := dict "transfer.sideChannelPort" $v.transfer.sideChannelPort "nodes.httpPort" $v.nodes.httpPort -}}
  {{- if and (ge (int $port) (int $ucx.first)) (le (int $port) (int $ucx.last)) -}}
    {{- fail (printf "%s (%d) lies within transfer.ucxPorts (%d to %d): move one of them." $name (int $port) (int $ucx.first) (int $ucx.last)) -}}
  {{- end -}}
{{- end -}}
{{- if and $v.kvEvents.enabled (lt (sub (max $v.kvEvents.port $v.kvEvents.replayPort) (min $v.kvEvents.port $v.kvEvents.replayPort) | int) 16) -}}
  {{- fail "kvEvents.port and kvEvents.replayPort must be 16 apart at least: each data-parallel rank takes a port of its own." -}}
{{- end -}}
{{- if eq (int $v.transfer.sideChannelPort) (int $v.nodes.httpPort) -}}
  {{- fail "transfer.sideChannelPort and nodes.httpPort are the same: each needs its own." -}}
{{- end -}}
{{- range $name := list "hostPath" "existingClaim" -}}
  {{- if and (eq $v.model.storage.kind $name) (not (get $v.model.storage $name)) -}}
    {{- fail (printf "model.storage.kind is %s: say which one in model.storage.%s." $name $name) -}}
  {{- end -}}
{{- end -}}
{{- range $name := list "apiKeys" "tickets" -}}
  {{- $secret := get $v $name -}}
  {{- if and $secret.keys $secret.existingSecret -}}
    {{- fail (printf "%s.keys and %s.existingSecret are both set: the secret would win silently, so keep one." $name $name) -}}
  {{- end -}}
{{- end -}}
{{- if and $v.metrics.podMonitor.enabled $v.networkPolicy.enabled (not $v.networkPolicy.scrapers) -}}
  {{- fail "metrics.podMonitor.enabled: the NetworkPolicy lets only the proxy speak HTTP to nodes; name Prometheus in networkPolicy.scrapers." -}}
{{- end -}}
{{- if and (eq (dig "otel" "export" "off" $v.proxy.settings) "otlp") $v.networkPolicy.enabled (not $v.networkPolicy.proxyEgress) -}}
  {{- fail "proxy.settings.otel.export is otlp: the NetworkPolicy keeps the proxy from the collector; let it through in networkPolicy.proxyEgress." -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}
  {{- fail "ingress.enabled: set ingress.host to the name that clients use." -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
  {{- fail "httpRoute.enabled: name the Gateway in httpRoute.parentRefs." -}}
{{- end -}}
{{- include "pdproxy.checks.settings" . -}}
{{- include "pdproxy.checks.upgrade" . -}}
{{- end -}}

{{/* What the chart decides itself, and where to say it instead. */}}
{{- define "pdproxy.checks.settings" -}}
{{- $said := .Values.proxy.settings -}}
{{- $elsewhere := dict
      "nodes" "nodes come from prefill and decode"
      "discovery" "use discovery.kind"
      "keys" "use apiKeys"
      "listen" "the pod's ports are fixed; TLS ends at the Ingress or Gateway" -}}
{{- range $section, $hint := $elsewhere -}}
  {{- if hasKey $said $section -}}{{- fail (printf "proxy.settings.%s cannot be set: %s." $section $hint) -}}{{- end -}}
{{- end -}}
{{- range $name, $value := dict "drain" "drainSeconds" "request" "requestSeconds" "shutdown" "shutdownSeconds" -}}
  {{- if hasKey ($said.deadlines | default dict) $name -}}
    {{- fail (printf "proxy.settings.deadlines.%s cannot be set: use proxy.%s, which other timeouts follow." $name $value) -}}
  {{- end -}}
{{- end -}}
{{- if and $said.upstream .Values.access.enabled -}}
  {{- fail "proxy.settings.upstream cannot be set while access.enabled gives the proxy its own key for the nodes." -}}
{{- end -}}
{{- end -}}
