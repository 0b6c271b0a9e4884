{{/* The proxy's settings file: what the operator says, and over it what the chart decides. */}}
{{- define "pdproxy.settings" -}}
{{- $v := .Values -}}
{{- $address := include "pdproxy.listenAddress" . -}}
{{- $listen := dict "host" $address "port" 8080 "admin_host" $address "admin_port" 8081
      "admin_names" (concat (include "pdproxy.adminNames" . | fromYamlArray) $v.proxy.adminNames) -}}
{{- $upstream := $v.proxy.settings.upstream | default (dict "credential" (ternary "none" "pass" $v.apiKeys.enabled)) -}}
{{- if $v.access.enabled -}}
  {{- $_ := set $listen "admin_token_file" "/etc/pdproxy/access/admin.token" -}}
  {{- $upstream = dict "credential" "replace" "credential_file" "/etc/pdproxy/access/node.key" -}}
{{- end -}}
{{- if $v.nodes.tls.enabled -}}
  {{- $upstream = merge (dict "ca_file" "/etc/pdproxy/nodes/ca.crt" "server_name" (include "pdproxy.tls.serverName" .)) $upstream -}}
{{- end -}}
{{- $own := dict "listen" $listen "upstream" $upstream
      "deadlines" (dict "drain" $v.proxy.drainSeconds "request" $v.proxy.requestSeconds
        "shutdown" (include "pdproxy.shutdownSeconds" . | float64)) -}}
{{- if not (hasKey ($v.proxy.settings.policy | default dict) "ticket_life") -}}
  {{- $_ := set $own "policy" (dict "ticket_life" $v.transfer.leaseSeconds) -}}
{{- end -}}
{{- if $v.apiKeys.enabled -}}
  {{- $_ := set $own "keys" (dict "file" "/etc/pdproxy/keys/api.keys") -}}
{{- end -}}
{{- if eq $v.discovery.kind "static" -}}
  {{- $_ := set $own "nodes" (fromYamlArray (include "pdproxy.staticNodes" .)) -}}
{{- else -}}
  {{- $_ := set $own "discovery" (fromYaml (include "pdproxy.discovery" .)) -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy $v.proxy.settings) $own) -}}
{{- end -}}

{{/* The names of the service of the operators' port, as a YAML list: others are refused. Probes and scrapes ask by address. */}}
{{- define "pdproxy.adminNames" -}}
{{- $service := printf "%s-admin" (include "pdproxy.fullname" .) -}}
{{- $in := printf "%s.%s" $service .Release.Namespace -}}
{{ list $service $in (printf "%s.svc" $in) (printf "%s.svc.cluster.local" $in) | toYaml }}
{{- end -}}

{{/* Seconds for running requests when a proxy ends: as long as the longest may last, unless something else is said. */}}
{{- define "pdproxy.shutdownSeconds" -}}
{{ .Values.proxy.shutdownSeconds | default .Values.proxy.requestSeconds }}
{{- end -}}

{{/* Seconds after which Kubernetes calls a rollout stuck: its own default, after the models had their time to load. */}}
{{- define "pdproxy.progressDeadlineSeconds" -}}
{{ add (int .Values.nodes.startupSeconds) 600 }}
{{- end -}}

{{- define "pdproxy.discovery" -}}
{{- $kind := .Values.discovery.kind -}}
{{- range $role := $.Values.nodes.kinds }}
{{- $service := include "pdproxy.headless" (dict "root" $ "component" $role) }}
{{ $role }}: {{ $kind }}
{{- if eq $kind "kubernetes" }}
{{ $role }}_selector: {{ if eq $.Values.nodes.upgrade.strategy "blueGreen" }}pdproxy.io/proxy={{ include "pdproxy.proxyName" $ }},app.kubernetes.io/component={{ $role }}{{ else }}kubernetes.io/service-name={{ $service }}{{ end }}
{{- else }}
{{ $role }}_name: {{ $service }}.{{ $.Release.Namespace }}.svc
{{- end }}
{{- end }}
{{- if eq $kind "kubernetes" }}
namespace: {{ .Release.Namespace | quote }}
port_name: http
{{- else }}
dns_port: {{ .Values.nodes.httpPort }}
{{- end }}
scheme: {{ include "pdproxy.scheme" . }}
{{- end -}}

{{/* Every node by its stable name. Where nodes are scaled, all that there may be: the proxy takes one in when it answers. */}}
{{- define "pdproxy.staticNodes" -}}
{{- $root := . -}}
{{- range $role := $root.Values.nodes.kinds -}}
{{- $r := get $root.Values $role -}}
{{- $count := ternary (int $r.replicas) (int $r.autoscaling.maxReplicas) (eq $r.autoscaling.kind "none") -}}
{{- $name := include "pdproxy.workload" (dict "root" $root "component" $role) -}}
{{- $hosts := ternary (int $r.hosts) 1 (gt (int $r.parallel.data) 1) -}}
{{- range $i := until $count }}
{{- range $host := until $hosts }}
- { {{ if ne $role "node" }}role: {{ $role }}, {{ end }}url: "{{ include "pdproxy.scheme" $root }}://{{ $name }}-{{ $i }}{{ if $host }}-{{ $host }}{{ end }}.{{ $name }}.{{ $root.Release.Namespace }}.svc:{{ $root.Values.nodes.httpPort }}" }
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
