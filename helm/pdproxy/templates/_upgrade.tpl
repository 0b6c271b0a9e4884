{{/* How nodes are replaced: nodes.upgrade. */}}

{{/* The kinds of nodes that this release has, as a YAML list: none where it is the proxy alone. */}}
{{- define "pdproxy.roles" -}}
{{- $upgrade := .Values.nodes.upgrade -}}
{{ ternary "[]" (toJson .Values.nodes.kinds) (and (eq $upgrade.strategy "blueGreen") (not $upgrade.proxy)) }}
{{- end -}}

{{/* Not empty where this release has a proxy. */}}
{{- define "pdproxy.hasProxy" -}}
{{- $upgrade := .Values.nodes.upgrade -}}
{{ if not (and (eq $upgrade.strategy "blueGreen") $upgrade.proxy) }}yes{{ end }}
{{- end -}}

{{/* The name of the proxy's objects, in this release or another one. */}}
{{- define "pdproxy.proxyName" -}}
{{ if include "pdproxy.hasProxy" . }}{{ include "pdproxy.fullname" . }}{{ else }}{{ .Values.nodes.upgrade.proxy }}{{ end }}
{{- end -}}

{{/* The label that ties several releases of nodes to one proxy; where one release has everything, none is needed. */}}
{{- define "pdproxy.setLabel" -}}
{{ if eq .Values.nodes.upgrade.strategy "blueGreen" }}pdproxy.io/proxy: {{ include "pdproxy.proxyName" . }}{{ end }}
{{- end -}}

{{/* What picks out a component's pods for a NetworkPolicy, in all releases. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.peer" -}}
{{- if eq .root.Values.nodes.upgrade.strategy "blueGreen" -}}
{{ include "pdproxy.setLabel" .root }}
app.kubernetes.io/component: {{ .component }}
{{- else -}}
{{ include "pdproxy.selector" . }}
{{- end -}}
{{- end -}}

{{/* Seconds for which a node that is to go waits at most for those that follow it; 0 where it does not ask. */}}
{{- define "pdproxy.waitSeconds" -}}
{{- $upgrade := .Values.nodes.upgrade -}}
{{ if eq $upgrade.strategy "inPlace" }}0{{ else }}{{ $upgrade.waitSeconds | default (include "pdproxy.progressDeadlineSeconds" .) }}{{ end }}
{{- end -}}

{{/* What a node does before SIGTERM. The vLLM image has Python, and not much else that speaks HTTP. The script is part of the
     pods of nodes that ask: a version of the chart in which it differs replaces them. */}}
{{- define "pdproxy.preStop" -}}
{{- $v := .Values -}}
{{- if ne $v.nodes.upgrade.strategy "inPlace" -}}
exec:
  command:
    - python3
    - -c
    - |
      {{- .Files.Get "files/leave.py" | nindent 6 }}
    - "http://{{ include "pdproxy.proxyName" . }}-admin:8081"
    - {{ $v.nodes.httpPort | quote }}
    - {{ include "pdproxy.waitSeconds" . | quote }}
    - {{ $v.nodes.leaveSeconds | quote }}
{{- else if $v.nodes.leaveSeconds -}}
sleep: { seconds: {{ $v.nodes.leaveSeconds }} }
{{- end -}}
{{- end -}}

{{- define "pdproxy.checks.upgrade" -}}
{{- $v := .Values -}}
{{- $strategy := $v.nodes.upgrade.strategy -}}
{{- if and (ne $strategy "inPlace") (ne $v.discovery.kind "kubernetes") -}}
  {{- fail (printf "nodes.upgrade.strategy is %s, which needs discovery.kind kubernetes: only EndpointSlices tell of nodes that go and still serve." $strategy) -}}
{{- end -}}
{{- if and $v.nodes.upgrade.proxy (ne $strategy "blueGreen") -}}
  {{- fail "nodes.upgrade.proxy is for nodes.upgrade.strategy blueGreen: leave it empty, or set the strategy." -}}
{{- end -}}
{{- if and $v.nodes.upgrade.proxy (eq $v.nodes.upgrade.proxy (include "pdproxy.fullname" .)) -}}
  {{- fail "nodes.upgrade.proxy is this release's own name: a release of nodes needs another one, such as NAME-blue." -}}
{{- end -}}
{{- if eq $strategy "surge" -}}
  {{- range $role := $v.nodes.kinds -}}
    {{- if gt (int (get $v $role).hosts) 1 -}}
      {{- fail (printf "nodes.upgrade.strategy surge is for nodes of one machine, and %s.hosts is above 1: use blueGreen." $role) -}}
    {{- end -}}
  {{- end -}}
  {{- if eq $v.nodes.compileCache.kind "claimPerPod" -}}
    {{- fail "nodes.upgrade.strategy surge makes Deployments, whose pods have no volumes of their own (nodes.compileCache.kind claimPerPod): use existingClaim or hostPath, or blueGreen." -}}
  {{- end -}}
  {{- if eq $v.model.storage.kind "claimPerPod" -}}
    {{- fail "nodes.upgrade.strategy surge makes Deployments, whose pods have no volumes of their own (model.storage.kind claimPerPod): use claim, existingClaim or hostPath, or blueGreen." -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* Nodes of a kind, 0 where there are none: with autoscaling, at most. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.mostNodes" -}}
{{- $r := get .root.Values .component -}}
{{- $most := ternary (int $r.replicas) (int $r.autoscaling.maxReplicas) (eq $r.autoscaling.kind "none") -}}
{{ ternary $most 0 (has .component .root.Values.nodes.kinds) }}
{{- end -}}

{{/* GPUs that another set of the nodes takes, or, with "of" N, N nodes of each kind. Takes (dict "root" $ …). */}}
{{- define "pdproxy.spareGpus" -}}
{{- $gpus := 0 -}}
{{- range $kind := .root.Values.nodes.kinds -}}
  {{- $r := get $.root.Values $kind -}}
  {{- $nodes := $.of | default (include "pdproxy.mostNodes" (dict "root" $.root "component" $kind)) | int -}}
  {{- $gpus = add $gpus (mul $nodes (int $r.gpus.count) (int $r.hosts)) -}}
{{- end -}}
{{ $gpus }}
{{- end -}}

{{/* "yes" where prefill nodes serve whole requests while there is no decode node. */}}
{{- define "pdproxy.servesWithoutDecode" -}}
{{ if eq (dig "policy" "on_no_decode" "fail" (.Values.proxy.settings | default dict)) "prefill" }}yes{{ end }}
{{- end -}}

{{/* For the notes: what an upgrade of the nodes takes, and what it costs. */}}
{{- define "pdproxy.upgradeNotes" -}}
{{- $upgrade := .Values.nodes.upgrade -}}
{{- $prefills := include "pdproxy.mostNodes" (dict "root" . "component" "prefill") | int -}}
{{- $decodes := include "pdproxy.mostNodes" (dict "root" . "component" "decode") | int -}}
{{- $boths := include "pdproxy.mostNodes" (dict "root" . "component" "node") | int -}}
{{- $fixed := not (has "node" .Values.nodes.kinds) -}}
A change of vLLM, model, weights, connector or settings of the nodes (nodes.upgrade.strategy: {{ $upgrade.strategy }})
{{- if eq $upgrade.strategy "surge" }} takes {{ include "pdproxy.spareGpus" (dict "root" . "of" $upgrade.maxSurge) }} spare GPUs:
{{ $upgrade.maxSurge }} more nodes of each {{ ternary "role. New nodes start first, of both roles at once" "kind. New nodes start first" $fixed }}. An old one that is to go serves on until
new ones of both roles serve and passed the known-answer test, for {{ include "pdproxy.waitSeconds" . }} s at most. No request fails. With spare GPUs for one
{{ ternary "role" "kind" $fixed }} only it takes those {{ include "pdproxy.waitSeconds" . }} s, and then degrades as inPlace does.
{{- else if and (eq $upgrade.strategy "blueGreen") $upgrade.proxy }} takes {{ include "pdproxy.spareGpus" (dict "root" .) }} spare GPUs:
a second release with all its nodes, beside this one:

  helm -n {{ .Release.Namespace }} install NEW-NAME CHART -f VALUES --set nodes.upgrade.strategy=blueGreen --set nodes.upgrade.proxy={{ $upgrade.proxy }}

/nodes and /ui of the proxy show both cohorts. Once the new one is complete, take this release away, its nodes first:

  helm -n {{ .Release.Namespace }} upgrade {{ .Release.Name }} CHART --reuse-values{{ range .Values.nodes.kinds }} --set {{ . }}.replicas=0{{ end }}
  helm -n {{ .Release.Namespace }} uninstall {{ .Release.Name }}

Nodes that go wait for the others to be complete, for {{ include "pdproxy.waitSeconds" . }} s at most. No request fails.
{{- else if eq $upgrade.strategy "blueGreen" }} is a new release of nodes. This
release is the proxy and has none; install nodes for it, and for each upgrade another set, which takes as many GPUs again:

  helm -n {{ .Release.Namespace }} install {{ .Release.Name }}-blue CHART -f VALUES --set nodes.upgrade.strategy=blueGreen --set nodes.upgrade.proxy={{ include "pdproxy.fullname" . }}
{{- else }} takes no
spare GPUs. {{ ternary "Both roles begin at once, each replaces" "Each kind replaces" $fixed }} one node at a time, the last one first, and each new node loads the model:
{{- if and (eq $decodes 1) (eq $boths 0) (gt $prefills 1) (include "pdproxy.servesWithoutDecode" .) }}
- The only decode node: prefill nodes serve whole requests until it has loaded again (policy.on_no_decode), and go on with its
  streams; those and prompts slow each other down.
{{- else if eq (add $decodes $boths) 1 }}
- The only {{ ternary "decode node" "node that answers" $fixed }}: NOTHING IS SERVED from the moment when it goes until it has loaded again. Requests get 503; then the
  proxies are not ready, and connections are refused. Streams that outlast nodes.leaveSeconds and nodes.drainSeconds ({{ add (int .Values.nodes.leaveSeconds) (int .Values.nodes.drainSeconds) }} s) end
  with an error event.
{{- else }}
{{- range $name, $count := dict "Decode nodes" $decodes "Nodes that do both" $boths }}
{{- if or $count (and $fixed (hasPrefix "D" $name)) }}
- {{ $name }}: {{ sub $count 1 }} of {{ $count }} serve at any time. Streams of the one that goes end there, or go on at another one.
{{- end }}
{{- end }}
{{- end }}
{{- if and $fixed (eq $prefills 1) }}
- The only prefill node: decode nodes compute prompts themselves until a new one serves, which is slower and disturbs their streams.
{{- else if or $fixed $prefills }}
- Prefill nodes: {{ sub $prefills 1 }} of {{ $prefills }} serve at any time.
{{- end }}
- Old and new nodes exchange no tickets: where a prompt finds no pair of one kind, {{ ternary "a decode node computes it" "the node that answers computes it" $fixed }}.
Without that: nodes.upgrade.strategy surge or blueGreen.
{{- end }}
{{- end -}}
