{{/* What a schema cannot say: values that do not go together. */}}
{{- define "pdproxy.checks" -}}
{{- $v := .Values -}}
{{- $both := has "node" $v.nodes.kinds -}}
{{- if not (or $both (and (has "prefill" $v.nodes.kinds) (has "decode" $v.nodes.kinds))) -}}
  {{- fail "nodes.kinds lacks a role: name prefill and decode, or node, whose nodes do both." -}}
{{- end -}}
{{- range $role := $v.nodes.kinds -}}
  {{- $r := get $v $role -}}
  {{- if and $both (gt (len $v.nodes.kinds) 1) (ne $r.autoscaling.kind "none") -}}
    {{- fail (printf "%s.autoscaling.kind is %s, and nodes.kinds names node beside others: what nodes are scaled by is the load of all kinds together. Scale by replicas." $role $r.autoscaling.kind) -}}
  {{- end -}}
  {{- include "pdproxy.checks.parallel" (dict "root" $ "component" $role) -}}
  {{- if gt (int $r.autoscaling.minReplicas) (int $r.autoscaling.maxReplicas) -}}
    {{- fail (printf "%s.autoscaling.minReplicas is above maxReplicas." $role) -}}
  {{- end -}}
  {{- $known := dict "prefill" "promptTokensPerReplica" "decode" "streamsPerReplica" -}}
  {{- range $other, $key := ternary dict (omit $known $role) (eq $role "node") -}}
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
  {{- if and (gt (int $r.hosts) 1) (eq $v.nodes.compileCache.kind "claimPerPod") -}}
    {{- fail (printf "nodes.compileCache.kind claimPerPod does not go with %s.hosts above 1: use existingClaim or hostPath." $role) -}}
  {{- end -}}
  {{- $claimed := list -}}
  {{- range $r.resourceClaims -}}{{- $claimed = append $claimed .name -}}{{- end -}}
  {{- range $r.resources.claims -}}
    {{- if not (has .name $claimed) -}}
      {{- fail (printf "%s.resources.claims names %s, and %s.resourceClaims does not: the pod would be refused." $role .name $role) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $unit := int $v.model.prefixMatchUnit -}}
{{- $first := dict -}}
{{- range $role := $v.nodes.kinds -}}
  {{- $size := include "pdproxy.blockSize" (dict "root" $ "component" $role) -}}
  {{- if and (ne $size "0") $first.size (ne $size $first.size) -}}
    {{- fail (printf "%s have --block-size %s, %s %s: such nodes exchange nothing. Set model.blockSize for both, and leave it out of extraArgs." (include "pdproxy.nodesOf" $first.role) $first.size (include "pdproxy.nodesOf" $role) $size) -}}
  {{- end -}}
  {{- if and (gt $unit 0) (ne 0 (mod (int $size) $unit)) -}}
    {{- fail (printf "model.prefixMatchUnit (%d) does not divide the block size (%s): vLLM would refuse to start. 16 divides any." $unit $size) -}}
  {{- end -}}
  {{- if and (ne $size "0") (not $first.size) -}}{{- $first = dict "role" $role "size" $size -}}{{- end -}}
{{- end -}}
{{- range $part := append $v.nodes.kinds "proxy" -}}
  {{- $names := list -}}
  {{- range (get $v $part).extraEnv -}}
    {{- if has .name $names -}}{{- fail (printf "%s.extraEnv names %s twice: keep one." $part .name) -}}{{- end -}}
    {{- $names = append $names .name -}}
  {{- end -}}
{{- end -}}
{{- if gt (int $v.proxy.autoscaling.minReplicas) (int $v.proxy.autoscaling.maxReplicas) -}}
  {{- fail "proxy.autoscaling.minReplicas is above maxReplicas." -}}
{{- end -}}
{{- include "pdproxy.checks.ports" . -}}
{{- range $name := list "hostPath" "existingClaim" -}}
  {{- if and (eq $v.model.storage.kind $name) (not (get $v.model.storage $name)) -}}
    {{- fail (printf "model.storage.kind is %s: say which one in model.storage.%s." $name $name) -}}
  {{- end -}}
{{- end -}}
{{- range $name := list "hostPath" "existingClaim" -}}
  {{- if and (eq $v.nodes.compileCache.kind $name) (not (get $v.nodes.compileCache $name)) -}}
    {{- fail (printf "nodes.compileCache.kind is %s: say which one in nodes.compileCache.%s." $name $name) -}}
  {{- end -}}
{{- end -}}
{{- if eq $v.nodes.compileCache.mountPath $v.model.storage.mountPath -}}
  {{- fail "nodes.compileCache.mountPath and model.storage.mountPath are the same: each volume needs a place of its own." -}}
{{- end -}}
{{- if $v.model.download.enabled -}}
  {{- if not (has $v.model.storage.kind (list "claim" "existingClaim")) -}}
    {{- fail (printf "model.download.enabled: the Job fetches into a volume that all nodes mount, and model.storage.kind is %s: use claim or existingClaim." $v.model.storage.kind) -}}
  {{- end -}}
  {{- if hasPrefix "/" $v.model.name -}}
    {{- fail (printf "model.download.enabled: model.name is the path %s, which nobody can fetch: give its name on the hub." $v.model.name) -}}
  {{- end -}}
{{- end -}}
{{- if and $v.nodes.tls.enabled (not $v.nodes.tls.secret) -}}
  {{- fail "nodes.tls.enabled: name the secret with tls.crt, tls.key and ca.crt in nodes.tls.secret." -}}
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
{{- if and $v.metrics.rules.enabled (not $v.metrics.serviceMonitor.enabled) -}}
  {{- fail "metrics.rules.enabled: no rule fires without metrics.serviceMonitor.enabled, which has Prometheus scrape the proxy and names its release." -}}
{{- end -}}
{{- if $v.metrics.rules.enabled -}}
  {{- $alerts := list -}}
  {{- range (.Files.Get "files/alerts.yaml" | fromYaml).groups -}}{{- range .rules -}}{{- $alerts = append $alerts .alert -}}{{- end -}}{{- end -}}
  {{- range $v.metrics.rules.without -}}
    {{- if not (has . $alerts) -}}{{- fail (printf "metrics.rules.without: there is no alert %s. There are: %s." . (join ", " $alerts)) -}}{{- end -}}
  {{- end -}}
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

{{/* How a role's engine is spread over its GPUs, and what both roles must have alike. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.checks.parallel" -}}
{{- $role := .component -}}
{{- $r := get .root.Values $role -}}
{{- $words := concat .root.Values.model.extraArgs $r.extraArgs | join " " -}}
{{- $in := regexFind "(--pipeline[-_]parallel[-_]size|-pp)[= ]([2-9]|[0-9]{2,})" $words -}}
{{- if or (gt (int ($r.parallel.pipeline | default 1)) 1) $in -}}
  {{- fail (printf "%s: a node cannot be pipeline parallel: vLLM's pull connector raises for it on hybrid models and on every decode node. Spread it by parallel.tensor or parallel.data." (ternary (printf "the argument %s" $in) (printf "%s.parallel.pipeline" $role) (ne $in ""))) -}}
{{- end -}}
{{- if regexMatch "(^| )--(code[-_]|tokenizer[-_])?revision[= ]" ($r.extraArgs | join " ") -}}
  {{- fail (printf "%s.extraArgs name a revision: say model.revision, for nodes of two revisions exchange nothing." $role) -}}
{{- end -}}
{{- range $name, $flag := dict "tensor" "(--tensor[-_]parallel[-_]size|-tp)" "data" "(--data[-_]parallel[-_]size|-dp)" -}}
  {{- if regexMatch (printf "(^| )%s[= ]" $flag) $words -}}
    {{- fail (printf "extraArgs of %s say a parallel size: say %s.parallel.%s, which GPUs and ports follow." (include "pdproxy.nodesOf" $role) $role $name) -}}
  {{- end -}}
{{- end -}}
{{- $all := mul (int $r.gpus.count) (int $r.hosts) -}}
{{- $wanted := mul (int $r.parallel.tensor) (int $r.parallel.data) -}}
{{- if and (gt (int $r.gpus.count) 0) (ne (int $all) (int $wanted)) -}}
  {{- fail (printf "%s.parallel wants %d GPUs (tensor %d x data %d), but %s have %d each (gpus.count %d on each of %d hosts): make them equal. For more engines use replicas." $role (int $wanted) (int $r.parallel.tensor) (int $r.parallel.data) (include "pdproxy.nodesOf" $role) (int $all) (int $r.gpus.count) (int $r.hosts)) -}}
{{- end -}}
{{- if and (gt (int $r.parallel.data) 1) (mod (int $r.parallel.data) (int $r.hosts)) -}}
  {{- fail (printf "%s.parallel.data is %d over %d hosts: each host takes as many data-parallel ranks as the next, and a rank lies on one host." $role (int $r.parallel.data) (int $r.hosts)) -}}
{{- end -}}
{{- end -}}

{{/* Ranges of ports that nodes listen on: none meets another, and all are ports. */}}
{{- define "pdproxy.checks.ports" -}}
{{- $v := .Values -}}
{{- $ucx := $v.transfer.ucxPorts -}}
{{- if ge (int $ucx.first) (int $ucx.last) -}}
  {{- fail "transfer.ucxPorts.first must be below last: each worker of a node takes ports of its own." -}}
{{- end -}}
{{- $more := sub (int (include "pdproxy.ranks" $v)) 1 | int -}}
{{- $ranges := list
      (list "transfer.ucxPorts" (int $ucx.first) (int $ucx.last))
      (list "nodes.httpPort" (int $v.nodes.httpPort) (int $v.nodes.httpPort))
      (list "transfer.sideChannelPort" (int $v.transfer.sideChannelPort) (add (int $v.transfer.sideChannelPort) $more | int)) -}}
{{- if $v.kvEvents.enabled -}}
  {{- range $name := list "port" "replayPort" -}}
    {{- $first := int (get $v.kvEvents $name) -}}
    {{- $ranges = append $ranges (list (printf "kvEvents.%s" $name) $first (add $first $more | int)) -}}
  {{- end -}}
{{- end -}}
{{- range $i, $one := $ranges -}}
  {{- if gt (index $one 2) 65535 -}}
    {{- fail (printf "%s: %d data-parallel ranks take the ports %d to %d, and there are none above 65535." (first $one) (add $more 1 | int) (index $one 1) (index $one 2)) -}}
  {{- end -}}
  {{- range $other := slice $ranges (int (add $i 1)) -}}
    {{- if and (le (index $one 1) (index $other 2)) (le (index $other 1) (index $one 2)) -}}
      {{- fail (printf "%s (%d to %d) and %s (%d to %d) meet: move one of them. Each data-parallel rank takes a port of its own." (first $one) (index $one 1) (index $one 2) (first $other) (index $other 1) (index $other 2)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* What the chart decides itself, and where to say it instead. */}}
{{- define "pdproxy.checks.settings" -}}
{{- $said := .Values.proxy.settings -}}
{{- $elsewhere := dict
      "nodes" "nodes come from prefill, decode and node"
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
